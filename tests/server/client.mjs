// The npm client against a server: node client.mjs BASE_URL MODEL. Prints one JSON object of what it got.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0, timeout: 60_000 });
const prompt = "The cat";
const messages = [{ role: "user", content: "Hello" }];
const options = { model, max_tokens: 12, temperature: 0 };

assert.ok((await client.models.list()).data.some((each) => each.id === model));

const whole = await client.completions.create({ ...options, prompt });
let text = "";
let usage = null;
for await (const chunk of await client.completions.create({
  ...options, prompt, stream: true, stream_options: { include_usage: true },
})) {
  text += chunk.choices[0]?.text ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, whole.choices[0].text);
assert.deepEqual(usage.completion_tokens, whole.usage.completion_tokens);

const answer = await client.chat.completions.create({ ...options, messages, logprobs: true, top_logprobs: 2 });
assert.equal(answer.choices[0].message.role, "assistant");
assert.equal(answer.choices[0].logprobs.content.length, answer.usage.completion_tokens);
let reply = "";
const stream = client.chat.completions.stream({ ...options, messages });
for await (const chunk of stream) reply += chunk.choices[0]?.delta?.content ?? "";
assert.equal(reply, answer.choices[0].message.content);
assert.equal((await stream.finalChatCompletion()).choices[0].message.content, reply);

const left = await client.chat.completions.create({ ...options, max_tokens: 200, messages, stream: true });
for await (const _ of left) break; // leaving the loop aborts the request

const refused = await client.completions.create({ ...options, prompt, temperature: -1 }).catch((error) => error);
assert.ok(refused instanceof OpenAI.BadRequestError);
assert.equal(refused.param, "temperature");
const unknown = await client.completions.create({ ...options, model: "nobody", prompt }).catch((error) => error);
assert.ok(unknown instanceof OpenAI.NotFoundError);

console.log(JSON.stringify({ text, reply, usage }));
