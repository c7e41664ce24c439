"""Questions by real clients: each line of input is one, {"id", "client", "url", "model", "most"}.

All are asked as they come, side by side. For each a line tells what its user gets: {"id", "text"} or {"id",
"error", "message"}. Runs in an environment of its own (see `environment`), so it knows nothing of anvil-mux.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable

import anthropic
import litellm
import ollama
import openai
from langchain_openai import ChatOpenAI

QUESTION = [{"role": "user", "content": "Say hello."}]
KEY = "not-a-key"
ANSWERS = sys.stdout


def openai_whole(url: str, model: str, most: int) -> str:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY)
    answer = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=most)  # type: ignore[arg-type]
    return answer.choices[0].message.content or ""


def openai_stream(url: str, model: str, most: int) -> str:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY)
    chunks = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=most, stream=True)  # type: ignore[call-overload]
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def openai_async(url: str, model: str, most: int) -> str:
    async def ask() -> str:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY)
        chunks = await client.chat.completions.create(  # type: ignore[call-overload]
            model=model, messages=QUESTION, max_tokens=most, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices])

    return asyncio.run(ask())


def anthropic_whole(url: str, model: str, most: int) -> str:
    client = anthropic.Anthropic(base_url=url, api_key=KEY)
    answer = client.messages.create(model=model, messages=QUESTION, max_tokens=most)  # type: ignore[arg-type]
    return "".join(block.text for block in answer.content if block.type == "text")


def anthropic_stream(url: str, model: str, most: int) -> str:
    client = anthropic.Anthropic(base_url=url, api_key=KEY)
    with client.messages.stream(model=model, messages=QUESTION, max_tokens=most) as stream:  # type: ignore[arg-type]
        text = "".join(stream.text_stream)
        assert stream.get_final_message().stop_reason
        return text


def ollama_whole(url: str, model: str, most: int) -> str:
    answer = ollama.Client(url).chat(model, QUESTION, options={"num_predict": most})
    return answer.message.content or ""


def ollama_stream(url: str, model: str, most: int) -> str:
    parts = list(ollama.Client(url).chat(model, QUESTION, stream=True, options={"num_predict": most}))
    assert parts[-1].done
    return "".join(part.message.content or "" for part in parts)


def litellm_whole(url: str, model: str, most: int) -> str:
    answer = litellm.completion(
        f"openai/{model}", QUESTION, api_base=f"{url}/v1", api_key=KEY, max_tokens=most
    )
    return answer.choices[0].message.content or ""


def litellm_stream(url: str, model: str, most: int) -> str:
    chunks = litellm.completion(
        f"openai/{model}", QUESTION, api_base=f"{url}/v1", api_key=KEY, stream=True, max_tokens=most
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def langchain_whole(url: str, model: str, most: int) -> str:
    chat = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key=KEY, max_tokens=most)  # type: ignore[call-arg, arg-type]
    return str(chat.invoke("Say hello.").content)


def langchain_async(url: str, model: str, most: int) -> str:
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
    "litellm": litellm_whole,
    "litellm-stream": litellm_stream,
    "langchain": langchain_whole,
    "langchain-async": langchain_async,
}


def ask(question: dict[str, str]) -> None:
    outcome = {"id": question["id"]}
    try:
        asked = CLIENTS[question["client"]]
        outcome["text"] = asked(question["url"], question["model"], int(question["most"]))
    except Exception as error:
        outcome |= {"error": type(error).__name__, "message": str(error)}
    ANSWERS.write(json.dumps(outcome) + "\n")
    ANSWERS.flush()


if __name__ == "__main__":
    sys.stdout = sys.stderr  # litellm advertises itself there
    for line in sys.stdin:
        threading.Thread(target=ask, args=[json.loads(line)], daemon=True).start()
