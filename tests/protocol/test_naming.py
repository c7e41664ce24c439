"""The model's name in bodies of every kind."""

import json
import random

import pytest

from anvil_mux.errors import (
    BadRequest,
    TooLarge,
)
from anvil_mux.protocol import naming

LARGE = naming.MAX_JSON_PARSED + 1


@pytest.mark.parametrize(
    ("content_type", "body", "kind"),
    [
        (b"application/json", b"", "json"),
        (b"Application/JSON; charset=utf-8", b"x", "json"),
        (b"application/vnd.x+json", b"x", "json"),
        (b"multipart/form-data; boundary=x", b"--x", "multipart"),
        (b"application/x-www-form-urlencoded", b' {"model"', "json"),
        (b"", b'\xef\xbb\xbf\n{"model"', "json"),
    ],
)
def test_what_a_body_is(content_type, body, kind):
    assert naming.media(content_type, body) == kind


@pytest.mark.parametrize(
    ("content_type", "body"), [(b"", b"model=x"), (b"text/plain", b"{}"), (b"text/xml", b"<")]
)
def test_other_bodies_are_not_supported(content_type, body):
    with pytest.raises(BadRequest) as caught:
        naming.media(content_type, body)
    assert caught.value.status == 415


@pytest.mark.parametrize(
    ("document", "model", "as_another"),
    [
        ('{"session":{"type":"realtime","model":"a"}}', "a", '{"session":{"type":"realtime","model":"new"}}'),
        (
            '{"x":"ä","session":{"model":"a"},"model":"b"}',
            "a",
            '{"x":"ä","session":{"model":"new"},"model":"b"}',
        ),
        (
            '{"session": {"audio": {"input": {"transcription": {"language": "de", "model": "a"}}}}}',
            "a",
            '{"session": {"audio": {"input": {"transcription": {"language": "de", "model": "new"}}}}}',
        ),
        (
            '{"model":"a","input_audio_transcription":{"model":"b"}}',
            "a",
            '{"model":"new","input_audio_transcription":{"model":"b"}}',
        ),
        ('{"input_audio_transcription":{"model":"a"}}', "a", '{"input_audio_transcription":{"model":"new"}}'),
        ('{"session":"model","x":{"session":{"model":"a"}}}', None, None),
    ],
)
def test_a_realtime_sessions_model_stands_within(document, model, as_another):
    found, span = [*naming.session_models(document.encode()), (None, None)][0]
    assert found == model
    if span:
        assert b"".join(naming.model_replaced(document.encode(), "new", span)).decode() == as_another


@pytest.mark.parametrize(
    ("document", "why"),
    [
        ('{"session":{"model":"a"},"session":{"model":"b"}}', "`session` is given twice"),
        ('{"session":{"model":"a","model":"b"}}', "`model` is given twice"),
        ('{"session":{"model":"a"},"Session":{"model":"b"}}', "`session` is given twice"),
        ('{"session":{"model":1}}', "`model` must be a string"),
        ('{"session":{"model":"a"}', "not JSON"),
        ("[]", "must be a JSON object"),
    ],
)
def test_a_session_whose_model_is_not_clear_is_refused(document, why):
    with pytest.raises(BadRequest, match=why):
        naming.session_models(document.encode())


def padded(document: str) -> bytes:
    """The same JSON, large enough to be scanned instead of parsed."""
    return document.encode() + b" " * LARGE


def raised(body: bytes) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        naming.model_and_stream(body)
    return caught.value


@pytest.mark.parametrize("sized", [str.encode, padded], ids=["parsed", "scanned"])
class TestModelInJson:
    @pytest.mark.parametrize(
        ("document", "expected"),
        [
            ('{"model":"a"}', ("a", False)),
            ('\ufeff \n{ "stream" : true , "model" : "a/b" }', ("a/b", True)),
            ('{"model":"a","stream":false}', ("a", False)),
            ('{"model":"a","stream":"true"}', ("a", False)),
            ('{"mod\\u0065l":"\\u0061\\"\\\\","x":[{"model":"b","stream":true}]}', ('a"\\', False)),
            ('{"x":{"model":"b"},"stream":true}', (None, True)),
            ('{"x":"model","y":"\\"model\\":\\"b\\"","model":"ä"}', ("ä", False)),
            ('{"x":"}","y":["]","{"],"z":"\\\\","model":"a"}', ("a", False)),
            ('{"x":["model",{"model":{"model":"c"}}]}', (None, False)),
            ("{}", (None, False)),
        ],
    )
    def test_the_top_level_counts(self, sized, document, expected):
        assert naming.model_and_stream(sized(document)) == expected

    @pytest.mark.parametrize(
        ("document", "param"),
        [
            ("", "body"),
            ("[]", "body"),
            ('"model"', "body"),
            ("null", "body"),
            ('{"model":"a"', "body"),
            ('{"model":"a', "body"),
            ('{"model":"a"}}', "body"),
            ('{"model":"a"}"x"', "body"),
            ('{"model":"a\\', "body"),
            ('{"model":1}', "model"),
            ('{"model":null}', "model"),
            ('{"model":["a"]}', "model"),
            ('{"model":""}', "model"),
            ('{"model":"\\ud800"}', "model"),
            ('{"model":"a","model":"a"}', "model"),
            ('{"model":"a","x":[1],"\\u006dodel":"b"}', "model"),
            ('{"model":"%s"}' % ("a" * 5000), "model"),
        ],
    )
    def test_the_rest_is_refused(self, sized, document, param):
        error = raised(sized(document))
        assert (error.status, error.param) == (400, param)

    def test_other_encodings_are_refused(self, sized):
        assert raised(sized('{"model":"a"}').decode().encode("utf-16")).param == "body"
        assert raised(sized('{"model":"a"}') + b"\xff").param == "body"


def test_deep_nesting_is_refused_not_a_crash():
    assert raised(b'{"x":' + b"[" * 100_000).param == "body"


def test_countless_strings_are_refused():
    with pytest.raises(TooLarge):
        naming.model_and_stream(b'{"x":[' + b'"",' * naming.MAX_STRINGS + b'""]}')


def _random_text(rng: random.Random) -> str:
    letters = ['"', "\\", "{", "}", "[", "]", ":", ",", "a", "model", "stream", "é", "\n", "\U0001f600", " "]
    return "".join(rng.choices(letters, k=rng.randrange(8)))


def _random_value(rng: random.Random, depth: int) -> object:
    kind = rng.randrange(8 if depth else 5)
    if kind < 5:
        return [_random_text(rng), rng.randrange(99), None, True, -1.5e9][kind]
    if kind == 5:
        return [_random_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return _random_object(rng, depth - 1)


def _random_object(rng: random.Random, depth: int) -> dict[str, object]:
    keys = [
        rng.choice(["model", "stream", "x", "models", _random_text(rng)]) for _ in range(rng.randrange(5))
    ]
    return {key: _random_value(rng, depth) for key in keys}


def _random_document(rng: random.Random) -> tuple[dict[str, object], str]:
    document = _random_object(rng, 3)
    if "model" in document:
        document["model"] = _random_text(rng) + "m"
    return document, json.dumps(
        document,
        ensure_ascii=rng.random() < 0.5,
        indent=rng.choice([None, None, 1, "\t"]),
        separators=rng.choice([(",", ":"), (" ,\r\n", " : ")]),
    )


def test_the_scanner_agrees_with_the_parser():
    rng = random.Random(4)
    for _ in range(2000):
        document, text = _random_document(rng)
        expected = document.get("model"), document.get("stream") is True
        assert naming.model_and_stream(text.encode()) == expected
        _, span, stream = naming._scan(text.encode())
        assert stream is expected[1]
        assert (span is not None) is ("model" in document)
        if span is not None:
            assert json.loads(text.encode()[slice(*span)]) == document["model"]


def test_renaming_changes_the_model_and_nothing_else():
    rng = random.Random(5)
    for _ in range(2000):
        document, text = _random_document(rng)
        changed = b"".join(naming.model_replaced(text.encode(), "new/näme"))
        assert json.loads(changed) == {**document, "model": "new/näme"}
        if "model" in document:
            start, end = naming._scan(text.encode())[1]
            assert changed == text.encode()[:start] + b'"new/n\\u00e4me"' + text.encode()[end:]


def test_renaming_takes_any_kind_of_buffer_and_keeps_a_byte_order_mark():
    marked = naming.model_replaced(bytearray(b'\xef\xbb\xbf{"model": "a" }'), "b")
    assert b"".join(marked) == b'\xef\xbb\xbf{"model": "b" }'
    assert b"".join(naming.model_replaced(b"{ }", "b")) == b'{"model":"b" }'


def test_long_strings_with_many_escapes_end_where_they_end():
    for text in ('\\"' * 3000, "\\\\" * 3000, "\\n" * 3001 + "x", "a" * 9000 + "\\\\"):
        body = b'{"x":"' + text.encode() + b'","model":"m"}'
        assert naming._scan(body)[1] == (len(body) - 4, len(body) - 1)


def test_a_body_that_ends_in_an_escape_is_refused():
    with pytest.raises(BadRequest):
        naming._scan(b'{"x":"a\\" \\')


def test_the_model_in_a_query():
    assert naming.model_in_query("") is None
    assert naming.model_in_query("model=a%2Fb&x=1") == "a/b"
    assert naming.model_in_query("model=a&model=a") == "a"
    for query in ("model=a&model=b", "model=", "model=%ff"):
        with pytest.raises(BadRequest) as caught:
            naming.model_in_query(query)
        assert caught.value.param == "model"


@pytest.mark.parametrize(
    ("content_type", "expected"),
    [
        (b"multipart/form-data; boundary=abc", b"abc"),
        (b'multipart/form-data; charset=x; Boundary="a b=c"', b"a b=c"),
    ],
)
def test_the_boundary_of_a_form(content_type, expected):
    assert naming.boundary(content_type) == expected


@pytest.mark.parametrize(
    "content_type",
    [
        b"multipart/form-data",
        b"multipart/form-data; boundary=",
        b"multipart/form-data; boundary=a; boundary=b",
        b"multipart/form-data; boundary=" + b"a" * 71,
        b'multipart/form-data; boundary="a "',
    ],
)
def test_a_form_without_one_valid_boundary_is_refused(content_type):
    with pytest.raises(BadRequest):
        naming.boundary(content_type)


def part(name: bytes, value: bytes, more: bytes = b"") -> bytes:
    return b'--B\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n' % (name, more, value)


FILE = part(b"file", b"\r\n--A\r\n\x00--B\r\r\n--" * 50, b'; filename="model.wav"\r\nContent-Type: audio/wav')


def scan(body: bytes, sizes: list[int]) -> naming.MultipartModelScanner:
    scanner = naming.MultipartModelScanner(b"B")
    start = 0
    while start < len(body):
        size = sizes[start % len(sizes)]
        scanner.feed(body[start : start + size])
        start += size
    scanner.finish()
    return scanner


@pytest.mark.parametrize(
    ("body", "model", "stream"),
    [
        (FILE + part(b"model", b"whisper") + part(b"stream", b"true") + b"--B--\r\n", "whisper", True),
        (part(b"model", b"whisper") + FILE + b"--B--", "whisper", False),
        (b"preamble\r\n" + part(b"model", "ä/b".encode()) + b"--B--\r\nepilogue\r\n--B\r\n", "ä/b", False),
        (part(b"stream", b"True", b'; filename="x"') + part(b"models", b"x") + b"--B--", None, False),
        (part(b"model", b"m", b"; filenames=x") + b"--B--", "m", False),
        (b"--B\r\ncontent-disposition:form-data;name=model\r\n\r\nm\r\n--B--", "m", False),
        (part(b"file", b"") + part(b"x", b'name="model"\r\n\r\nno') + b"--B--", None, False),
        (b"--B--", None, False),
    ],
)
def test_the_model_of_a_form_is_found_wherever_it_is_and_however_it_arrives(body, model, stream):
    rng = random.Random(6)
    for sizes in [[1], [len(body)], *([rng.randrange(1, 40) for _ in range(7)] for _ in range(20))]:
        seen = scan(body, sizes)
        assert (seen.model, seen.stream) == (model, stream)
        if model is not None:
            assert seen.span is not None
            assert body[slice(*seen.span)] == model.encode()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no form",
        part(b"model", b"m"),
        part(b"model", b"m") + part(b"model", b"m") + b"--B--",
        part(b"model", b"") + b"--B--",
        part(b"model", b"\xff") + b"--B--",
        part(b"model", b"m" * 9000) + b"--B--",
        part(b"model", b"m", b'; name="x"') + b"--B--",
        part(b"model", b"m") + part(b"model", b"x", b'; filename="x"') + b"--B--",
        part(b"model", b"x", b"; filename*=utf-8''x") + part(b"model", b"m") + b"--B--",
        part(b"model", b"x", b"; filename*0=x") + b"--B--",
        part(b"model", b"m") + part(b"model", b"x", b"; filenames=x") + b"--B--",
        *(part(b"model", b"m") + part(each, b"x") + b"--B--" for each in (b"Model", b"model[]", b" model")),
        *(part(b"model", b"m") + part(each, b"x") + b"--B--" for each in (b"m\\odel", b"'model'", b"model ")),
        b"--Bx\r\n\r\nm\r\n--B--",
        b"--B\r\nbad head\r\n\r\nm\r\n--B--",
        b"--B\r\nX: " + b"a" * 9000,
        part(b"x", b"y") * (naming.MAX_PARTS + 1) + b"--B--",
    ],
    ids=lambda body: repr(body)[:40],
)
def test_a_broken_form_is_refused(body):
    for size in (1, 4096):
        with pytest.raises(BadRequest):
            scan(body, [size])


def test_a_file_passes_the_scanner_without_being_kept():
    scanner = naming.MultipartModelScanner(b"B")
    scanner.feed(part(b"file", b"", b'; filename="x"')[:-2])
    for _ in range(100):
        scanner.feed(b"\r\n--" * 1000)
        assert len(scanner._held) < 16


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"a","mod\\u0065l":"b"}',
        b'{"\\u006Dodel":"b","model":"a"}',
        b'{"model":"a", "model" :"b"}',
    ],
)
def test_a_model_named_twice_is_refused_however_it_is_written(body):
    with pytest.raises(BadRequest, match="twice"):
        naming.model_and_stream(body)


@pytest.mark.parametrize(
    "body", [b'{"model":"a"}{"x":1}', b'{"model":"a"', b'{"model":"a"}x', b'{"model":"a",}']
)
def test_more_or_less_than_one_document_is_refused_also_on_the_quick_path(body):
    with pytest.raises(BadRequest, match="JSON"):
        naming.model_and_stream(body)


@pytest.mark.parametrize("filling", [b"", b" " * LARGE], ids=["parsed", "scanned"])
@pytest.mark.parametrize("key", [b"Model", b"MODEL", b"mod\\u0045l"])
def test_a_key_that_only_some_servers_read_as_the_model_is_refused(key, filling):
    with pytest.raises(BadRequest, match="is written `model`"):
        naming.model_and_stream(b'{"model":"a",%b"%b":"b"}' % (filling, key))


@pytest.mark.parametrize("key", ["models", "Fallbacks", "context_fallbacks", "mod\\u0065ls"])
@pytest.mark.parametrize("shift", range(-14, 3))
def test_a_key_that_names_more_models_is_found_wherever_a_large_body_is_cut(key, shift):
    filling = "x" * (naming.STEP + shift - len('{"a":"",'))
    body = f'{{"a":"{filling}","{key}":[]}}'.encode()
    with pytest.raises(BadRequest, match="may name other models"):
        naming.refuse_more_models(body)
    naming.refuse_more_models(f'{{"a":"{filling}","model":"m"}}'.encode())


def test_brackets_of_a_large_body_are_counted_over_its_pieces():
    inner = "[" + "1," * naming.STEP + "[{}]]"
    body = f'{{"x":{inner},"model":"m","y":{inner}}}'.encode()
    assert naming.model_and_stream(body) == ("m", False)
