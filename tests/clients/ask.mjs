// Questions by real clients: each line of input is one, {"id", "client", "url", "model", "most"}.
// All are asked as they come, side by side. For each a line tells what its user gets: {"id", "text"} or
// {"id", "error", "message"}.

import { createInterface } from 'node:readline';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import Anthropic from '@anthropic-ai/sdk';
import { generateText, streamText } from 'ai';
import { Ollama } from 'ollama';
import OpenAI from 'openai';

const question = [{ role: 'user', content: 'Say hello.' }];
const apiKey = 'not-a-key';

const clients = {
  async openai(url, model, most) {
    const client = new OpenAI({ baseURL: `${url}/v1`, apiKey });
    const answer = await client.chat.completions.create({ model, messages: question, max_tokens: most });
    return answer.choices[0].message.content;
  },
  async 'openai-stream'(url, model, most) {
    const client = new OpenAI({ baseURL: `${url}/v1`, apiKey });
    const chunks = await client.chat.completions.create({ model, messages: question, max_tokens: most, stream: true });
    let text = '';
    for await (const chunk of chunks) text += chunk.choices[0]?.delta?.content ?? '';
    return text;
  },
  async anthropic(url, model, most) {
    const client = new Anthropic({ baseURL: url, apiKey });
    const answer = await client.messages.create({ model, messages: question, max_tokens: most });
    return answer.content.map((block) => block.text ?? '').join('');
  },
  async 'anthropic-stream'(url, model, most) {
    const client = new Anthropic({ baseURL: url, apiKey });
    const stream = client.messages.stream({ model, messages: question, max_tokens: most });
    return await stream.finalText();
  },
  async ollama(url, model, most) {
    const client = new Ollama({ host: url });
    return (await client.chat({ model, messages: question, options: { num_predict: most } })).message.content;
  },
  async 'ollama-stream'(url, model, most) {
    const client = new Ollama({ host: url });
    const parts = await client.chat({ model, messages: question, stream: true, options: { num_predict: most } });
    let text = '';
    let done = false;
    for await (const part of parts) {
      text += part.message.content;
      done = part.done;
    }
    if (!done) throw new Error('the stream ended before it was done');
    return text;
  },
  async 'ai-stream'(url, model, most) {
    const result = streamText({ ...asked(url, model, most), onError() {} });
    let text = '';
    for await (const part of result.fullStream) {
      if (part.type === 'text-delta') text += part.text;
      if (part.type === 'error') throw part.error;
    }
    return text;
  },
  async ai(url, model, most) {
    return (await generateText(asked(url, model, most))).text;
  },
};

function asked(url, model, most) {
  const provider = createOpenAICompatible({ name: 'mux', baseURL: `${url}/v1`, apiKey });
  return { model: provider(model), messages: question, maxOutputTokens: most };
}

async function ask({ id, client, url, model, most }) {
  let outcome;
  try {
    outcome = { text: await clients[client](url, model, most) };
  } catch (error) {
    outcome = { error: error?.name ?? 'Error', message: String(error?.message ?? JSON.stringify(error)) };
  }
  console.log(JSON.stringify({ id, ...outcome }));
}

for await (const line of createInterface({ input: process.stdin })) ask(JSON.parse(line));
