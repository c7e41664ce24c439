// One question by a real client: `ask.mjs CLIENT URL MODEL MAX_TOKENS` prints what its user gets, as JSON.

const question = [{ role: 'user', content: 'Say hello.' }];
const apiKey = 'not-a-key';

const clients = {
  async openai(url, model, most) {
    const { default: OpenAI } = await import('openai');
    const client = new OpenAI({ baseURL: `${url}/v1`, apiKey });
    const answer = await client.chat.completions.create({ model, messages: question, max_tokens: most });
    return answer.choices[0].message.content;
  },
  async 'openai-stream'(url, model, most) {
    const { default: OpenAI } = await import('openai');
    const client = new OpenAI({ baseURL: `${url}/v1`, apiKey });
    const chunks = await client.chat.completions.create({ model, messages: question, max_tokens: most, stream: true });
    let text = '';
    for await (const chunk of chunks) text += chunk.choices[0]?.delta?.content ?? '';
    return text;
  },
  async 'anthropic-stream'(url, model, most) {
    const { default: Anthropic } = await import('@anthropic-ai/sdk');
    const client = new Anthropic({ baseURL: url, apiKey });
    const stream = client.messages.stream({ model, messages: question, max_tokens: most });
    return await stream.finalText();
  },
  async 'ollama-stream'(url, model, most) {
    const { Ollama } = await import('ollama');
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
    const { streamText } = await import('ai');
    const result = streamText({ ...(await asked(url, model, most)), onError() {} });
    let text = '';
    for await (const part of result.fullStream) {
      if (part.type === 'text-delta') text += part.text;
      if (part.type === 'error') throw part.error;
    }
    return text;
  },
  async ai(url, model, most) {
    const { generateText } = await import('ai');
    return (await generateText(await asked(url, model, most))).text;
  },
};

async function asked(url, model, most) {
  const { createOpenAICompatible } = await import('@ai-sdk/openai-compatible');
  const provider = createOpenAICompatible({ name: 'mux', baseURL: `${url}/v1`, apiKey });
  return { model: provider(model), messages: question, maxOutputTokens: most };
}

const [name, url, model, most] = process.argv.slice(2);
let outcome;
try {
  outcome = { text: await clients[name](url, model, Number(most)) };
} catch (error) {
  outcome = { error: error?.name ?? 'Error', message: String(error?.message ?? JSON.stringify(error)) };
}
console.log(JSON.stringify(outcome));
