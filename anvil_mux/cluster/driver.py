"""The driver: the child process that carries the calls of anvil-mux to the agents of the hosts, by Ray.

Ray ends the process that it runs in when its head is lost, so this is a process of its own, which anvil-mux
starts anew. Calls come as frames on its standard input, and answers leave as frames. Host "" is the cluster:
``nodes`` lists its hosts. A host has ``hello``, and ``call`` with a text; its answers are texts, which nobody
reads here. The first frame has the number 0 and says whether the cluster was joined, or why not. Another 0
says why the driver ends of itself. Standard error has Ray's own words, for a log file.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from typing import BinaryIO

from anvil_mux.cluster.frames import CallFrame, dump, read_frame
from anvil_mux.cluster.links import PING_SECONDS, PINGS, Calls, Carrier, Refused, SilenceWatch
from anvil_mux.cluster.membership import join, probe

JOIN_SECONDS = 15.0
"""Until the first frame is written, come what may; anvil-mux waits for it a little longer."""
DONE, REFUSED, SILENT = 0, 1, 3
"""How it exits: its input ended; it was not let in; no host answers any more."""


def main(argv: list[str] | None = None) -> int:
    """Run until the input ends."""
    parser = argparse.ArgumentParser(prog="python -m anvil_mux.cluster.driver")
    parser.add_argument("address", help="the head of the cluster, HOST:PORT")
    parser.add_argument("--insecure", action="store_true", help="also a cluster that wants no token")
    parser.add_argument(
        "--probe", action="store_true", help="exit with 11 if the cluster wants a token, with 10 if not"
    )
    options = parser.parse_args(argv)
    if options.probe:
        return probe(options.address)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for anvil-mux, which needs its hosts to drain
    calls = Calls(take_output())
    unanswered = threading.Timer(JOIN_SECONDS, give_up, (calls, options.address))
    unanswered.daemon = True
    unanswered.start()
    try:
        cluster, version = join(options.address, insecure=options.insecure)
    except Refused as error:
        unanswered.cancel()
        calls.write(0, False, str(error))
        return REFUSED
    unanswered.cancel()
    calls.write(0, True, dump({"ray": version}))
    watch = SilenceWatch()
    threading.Thread(target=calls.expire, args=(watch.failed,), name="deadlines", daemon=True).start()
    threading.Thread(target=end_when_silent, args=(watch, calls), name="silence", daemon=True).start()
    serve(Carrier(cluster, calls, watch), sys.stdin.buffer)
    return DONE


def serve(carrier: Carrier, source: BinaryIO) -> None:
    """Begin the calls that come in, until no more can come."""
    while (frame := read_frame(source, CallFrame)) is not None:
        carrier.begin(*frame)


def take_output() -> BinaryIO:
    """Return standard output, and let whoever prints from now on print to nowhere: Ray does."""
    output = os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    return output


def give_up(calls: Calls, address: str) -> None:
    """End a process in which Ray does not return."""
    late = f"the cluster at {address} did not answer in {JOIN_SECONDS:g} s"
    calls.write(
        0, False, f"{late}: does the head hang, or use TLS where this machine does not (RAY_USE_TLS)?"
    )
    os._exit(REFUSED)


def end_when_silent(watch: SilenceWatch, calls: Calls) -> None:
    """End when no host answers: what this process knows of the cluster is stale then."""
    watch.wait()
    calls.write(0, False, f"no host has answered for {PINGS * PING_SECONDS:g} s")
    os._exit(SILENT)


if __name__ == "__main__":
    # Not by way of Ray's own end, which waits for what may be gone.
    os._exit(main())
