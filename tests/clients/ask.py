"""One question by a real client: `ask.py CLIENT URL MODEL MAX_TOKENS` prints what its user gets, as JSON.

Runs in an environment of its own (see `environment`), so it knows nothing of anvil-mux.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable

QUESTION = [{"role": "user", "content": "Say hello."}]
KEY = "not-a-key"


def openai_whole(url: str, model: str, most: int) -> str:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key=KEY)
    answer = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=most)  # type: ignore[arg-type]
    return answer.choices[0].message.content or ""


def openai_stream(url: str, model: str, most: int) -> str:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key=KEY)
    chunks = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=most, stream=True)  # type: ignore[call-overload]
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def openai_async(url: str, model: str, most: int) -> str:
    from openai import AsyncOpenAI

    async def ask() -> str:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY)
        chunks = await client.chat.completions.create(  # type: ignore[call-overload]
            model=model, messages=QUESTION, max_tokens=most, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices])

    return asyncio.run(ask())


def anthropic_whole(url: str, model: str, most: int) -> str:
    from anthropic import Anthropic

    client = Anthropic(base_url=url, api_key=KEY)
    answer = client.messages.create(model=model, messages=QUESTION, max_tokens=most)  # type: ignore[arg-type]
    return "".join(block.text for block in answer.content if block.type == "text")


def anthropic_stream(url: str, model: str, most: int) -> str:
    from anthropic import Anthropic

    client = Anthropic(base_url=url, api_key=KEY)
    with client.messages.stream(model=model, messages=QUESTION, max_tokens=most) as stream:  # type: ignore[arg-type]
        text = "".join(stream.text_stream)
        assert stream.get_final_message().stop_reason
        return text


def ollama_whole(url: str, model: str, most: int) -> str:
    import ollama

    client = ollama.Client(url)
    answer = client.chat(model, QUESTION, options={"num_predict": most})
    return answer.message.content or ""


def ollama_stream(url: str, model: str, most: int) -> str:
    import ollama

    parts = list(ollama.Client(url).chat(model, QUESTION, stream=True, options={"num_predict": most}))
    assert parts[-1].done
    return "".join(part.message.content or "" for part in parts)


def litellm_stream(url: str, model: str, most: int) -> str:
    import litellm

    chunks = litellm.completion(
        f"openai/{model}", QUESTION, api_base=f"{url}/v1", api_key=KEY, stream=True, max_tokens=most
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def langchain_async(url: str, model: str, most: int) -> str:
    from langchain_openai import ChatOpenAI

    async def ask() -> str:
        chat = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key=KEY, max_tokens=most)  # type: ignore[call-arg, arg-type]
        return "".join([str(chunk.content) async for chunk in chat.astream("Say hello.")])

    return asyncio.run(ask())


CLIENTS: dict[str, Callable[[str, str, int], str]] = {
    "openai": openai_whole,
    "openai-stream": openai_stream,
    "openai-async": openai_async,
    "anthropic": anthropic_whole,
    "anthropic-stream": anthropic_stream,
    "ollama": ollama_whole,
    "ollama-stream": ollama_stream,
    "litellm-stream": litellm_stream,
    "langchain-async": langchain_async,
}


def main() -> None:
    name, url, model, most = sys.argv[1:]
    try:
        outcome = {"text": CLIENTS[name](url, model, int(most))}
    except Exception as error:
        outcome = {"error": type(error).__name__, "message": str(error)}
    print(json.dumps(outcome))


if __name__ == "__main__":
    main()
