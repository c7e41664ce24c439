"""The logs of engines are read while they load, and at no other time; lines as engines print them in."""

import threading

import pytest

from anvil_mux.config.config import Backend
from anvil_mux.host import engines
from anvil_mux.host.engines import LoadLogs, cause, stage_of
from anvil_mux.host.seam import LoadStage

GUARD = 20.0
A, B = Backend("a", "a"), Backend("b", "b")
SHARDS = "Loading safetensors checkpoint shards:  56% Completed | 5/9 [00:13<00:11,  2.87s/it]"
GRAPHS = (
    "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  40%|████      | 20/51 [00:02<00:03, 21.2it/s]"
)
BATCHES = "Capturing batches (bs=128 avail_mem=74.76 GB):   5%|▌         | 1/20 [00:00<00:09,  2.1it/s]"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (SHARDS, LoadStage("a", "reading weights", 0.56, 11.0)),
        (f"(Worker_TP0 pid=576689) \r{SHARDS}", LoadStage("a", "reading weights", 0.56, 11.0)),
        (SHARDS.replace("56%", "11%") + "\r" + SHARDS, LoadStage("a", "reading weights", 0.56, 11.0)),
        (SHARDS.replace("00:11", "1:02:03"), LoadStage("a", "reading weights", 0.56, 3723.0)),
        (SHARDS.replace("00:13<00:11", "00:00<?"), LoadStage("a", "reading weights", 0.56, None)),
        (SHARDS.replace("safetensors", "pt"), LoadStage("a", "reading weights", 0.56, 11.0)),
        (GRAPHS, LoadStage("a", "capturing CUDA graphs", 0.4, 3.0)),
        (BATCHES, LoadStage("a", "capturing CUDA graphs", 0.05, 9.0)),
        ("m.safetensors:  13%|█▎  | 65M/5G [00:10<01:06, 65MB/s]", LoadStage("a", "downloading", 0.13, 66.0)),
        ("INFO [backends.py:1128] Dynamo bytecode transform time: 3.54 s", LoadStage("a", "compiling")),
        ("INFO 05-06 20:59:57 Loading weights took 24.8 seconds", LoadStage("a", "warming up")),
        ("0.00.024.273 I load_tensors: loading model tensors", LoadStage("a", "reading weights")),
        ("...............................................", LoadStage("a", "reading weights", 0.47)),
        ("." * 107, LoadStage("a", "reading weights", 1.0)),
        ("0.00.039.373 I llama_context: constructing llama_context", LoadStage("a", "warming up")),
        ('source=server.go:625 msg="model load progress 0.43"', LoadStage("a", "reading weights", 0.43)),
        ("GET /health 503", None),
        ("100% sure that this is nothing [00:01<00:02]", None),
        (".", None),
    ],
)  # fmt: skip
def test_what_a_line_says(line, found):
    assert stage_of("a", [line]) == found


def test_the_last_line_that_says_something_counts():
    lines = [SHARDS, "INFO GPU KV cache size: 165,792 tokens", GRAPHS, "INFO nothing of interest"]
    assert stage_of("a", lines) == LoadStage("a", "capturing CUDA graphs", 0.4, 3.0)
    assert stage_of("a", []) is None


def test_logs_are_read_only_while_something_loads(monkeypatch):
    monkeypatch.setattr(engines, "LOOK_SECONDS", 0.0)
    told = {"a": threading.Event(), "b": threading.Event()}
    read: list[str] = []

    def tail(backend: Backend, lines: int) -> list[str]:
        read.append(backend.name)
        return [SHARDS]

    logs = LoadLogs(tail, lambda what: told[what.backend].set())
    logs.worker.start()
    for backend in (A, B):
        with logs.reading(backend):
            assert told[backend.name].wait(GUARD)
    logs.worker.close()
    assert logs.worker.join(GUARD)
    assert [*dict.fromkeys(read)] == ["a", "b"]


def test_a_log_that_was_read_too_late_says_nothing():
    def tail(backend: Backend, lines: int) -> list[str]:
        loading.__exit__(None, None, None)
        return [SHARDS]

    logs = LoadLogs(tail, pytest.fail)
    loading = logs.reading(A)
    loading.__enter__()
    assert logs._turn() == engines.LOOK_SECONDS
    assert logs._turn() is None


LLAMA = """\
0.00.014.245 I srv  llama_server: initializing ...
0.00.109.591 W srv  llama_server: security: no API key is set and CORS allows all origins
0.00.152.773 I srv    load_model: loading model '/m/none.gguf'
0.00.152.907 E %s
0.00.153.024 E llama_model_load_from_file_impl: failed to load model
0.00.153.054 E common_fit_params: encountered an error while trying to fit params: failed to load model
0.00.153.067 I srv    operator(): operator(): cleaning up before exit...
0.00.192.905 E srv  llama_server: exiting due to model loading error"""
VLLM = """\
(EngineCore_DP0 pid=272) ERROR 10-09 13:53:19 [core.py:708] EngineCore failed to start.
(EngineCore_DP0 pid=272) ERROR 10-09 13:53:19 [core.py:708] Traceback (most recent call last):
(EngineCore_DP0 pid=272) ERROR 10-09 13:53:19 [core.py:708] %s
(APIServer pid=1)   File "vllm/v1/engine/utils.py", line 729, in wait_for_engine_startup
(APIServer pid=1)     raise RuntimeError("Engine core initialization failed. See root cause above.")
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above."""
SHORT = "it needs more GPU memory than is free"
FILE, NEWER = "check the path in its command", "this version of the engine does not know"
NO_GPU, PORT = "it sees no GPU", "another program has this port"


@pytest.mark.parametrize(
    ("log", "line", "advice"),
    [
        (LLAMA, "gguf_init_from_file: failed to open GGUF file 'a.gguf' (No such file or directory)", FILE),
        (LLAMA, "llama_model_load: error loading model: unknown model architecture: 'lLama'", NEWER),
        (LLAMA, "start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 9556", PORT),
        (LLAMA, "alloc_buffer: allocating 35533.34 MiB on device 0: cudaMalloc failed: out of memory", SHORT),
        (LLAMA, "gguf_init_from_reader: invalid magic characters: 'hell', expected 'GGUF'", ""),
        ("%s", "error: invalid argument: --bogus", ""),
        ("%s", 'error while handling argument "--device": invalid device: CUDA0', NO_GPU),
        ("%s", "vk::Device::allocateMemory: ErrorOutOfDeviceMemory", SHORT),
        ("%s", "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", SHORT),
        (VLLM, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", SHORT),
        (VLLM, "ValueError: No available memory for the cache blocks.", SHORT),
        (VLLM, "ValueError: Free memory on device (3.2/23.7 GiB) on startup is less than desired", SHORT),
        (VLLM, "ValueError: Model architectures ['XForCausalLM'] are not supported for now.", NEWER),
        (VLLM, "OSError: org/none is not a local folder and is not a valid model identifier listed on", FILE),
        (VLLM, "RuntimeError: Failed to infer device type", NO_GPU),
        (
            VLLM,
            "ImportError: libcuda.so.1: cannot open shared object file: No such file or directory",
            NO_GPU,
        ),
        (VLLM, "ValueError: max_model_len (16384) is greater than the derived max_model_len", ""),
        (VLLM, "OSError: [Errno 98] Address already in use", PORT),
    ],
)
def test_the_line_that_says_why_an_engine_ended_is_found_with_advice(log, line, advice):
    found = cause((log % line).splitlines(), ended=True, contained=False)
    assert found.startswith(f"{line}; {advice}" if advice else line)
    assert bool(advice) is (found != line)


def test_what_an_engine_that_runs_prints_is_no_cause_of_its_end():
    lines = (LLAMA % "gguf_init: (No such file or directory)").splitlines()
    assert cause(lines, ended=False, contained=True) == ""
    assert cause(["INFO: all is well"], ended=True, contained=True) == ""
    assert len(cause([f"error: {'x' * 5000}"], ended=True, contained=True)) < 400


@pytest.mark.parametrize(
    "line",
    [
        "0.00.554.220 I srv  llama_server: listening on http://127.0.0.1:8080",
        "INFO:     Uvicorn running on http://localhost:30000 (Press CTRL+C to quit)",
    ],
)
def test_who_listens_only_inside_its_container_is_told_how_to_listen_outside(line):
    assert cause([line], ended=False, contained=True).endswith("add --host 0.0.0.0 to its command")
    assert cause([line], ended=False, contained=False) == ""
    heard = line.replace("127.0.0.1", "0.0.0.0").replace("localhost", "0.0.0.0")
    assert cause([heard], ended=False, contained=True) == ""
