// openai-node, unchanged, at the server whose address is the first argument: chat, streams, tools, parse, responses.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "hi" }];
const Paint = z.object({ color: z.enum(["red", "blue"]), fast: z.boolean() });
const parameters = {
  type: "object",
  properties: { color: { enum: ["red", "blue"] }, fast: { type: "boolean" } },
  required: ["color", "fast"],
  additionalProperties: false,
};

assert.deepEqual((await client.models.list()).data.map((card) => card.id), [model]);

const fixed = { model, temperature: 0, max_tokens: 12 };
const chat = await client.chat.completions.create({ ...fixed, messages });
let text = "";
for await (const chunk of await client.chat.completions.create({ ...fixed, messages, stream: true }))
  text += chunk.choices[0]?.delta.content ?? "";
assert.equal(text, chat.choices[0].message.content);
assert.equal(chat.usage.total_tokens, chat.usage.prompt_tokens + chat.usage.completion_tokens);

const runner = client.chat.completions.stream({ ...fixed, messages });
assert.equal(await runner.finalContent(), chat.choices[0].message.content);

const parsed = await client.chat.completions.parse({
  model, messages, max_tokens: 200, response_format: zodResponseFormat(Paint, "paint"),
});
Paint.parse(parsed.choices[0].message.parsed);

for (const stream of [false, true]) {
  const calls = [];
  const tools = [{
    type: "function",
    function: {
      name: "paint", description: "Paint.", parameters, parse: JSON.parse,
      function: (paint) => { calls.push(Paint.parse(paint)); return "done"; },
    },
  }];
  const choice = { type: "function", function: { name: "paint" } }; // the runner ends after a named function
  const run = client.chat.completions.runTools({ model, messages, tools, tool_choice: choice, max_tokens: 200, stream });
  await run.done();
  assert.equal(calls.length, 1);
  const results = run.messages.filter((message) => message.role === "tool");
  assert.equal(results.length, 1);
  assert.equal(results[0].content, "done");
  const last = await client.chat.completions.create({ ...fixed, messages: run.messages, tools: undefined });
  assert.ok(last.usage.prompt_tokens > chat.usage.prompt_tokens);
}

const completion = await client.completions.create({ model, prompt: "Water is", max_tokens: 5, logprobs: 2 });
assert.equal(completion.choices[0].logprobs.tokens.length, completion.usage.completion_tokens);

const asked = { model, input: "hi", temperature: 0, max_output_tokens: 12 };
const response = await client.responses.create(asked);
let streamed = "";
for await (const event of await client.responses.create({ ...asked, stream: true }))
  if (event.type === "response.output_text.delta") streamed += event.delta;
assert.equal(streamed, response.output_text);
const structured = await client.responses.parse({
  model, input: "hi", max_output_tokens: 200, text: { format: zodTextFormat(Paint, "paint") },
});
Paint.parse(structured.output_parsed);

const controller = new AbortController();
const endless = await client.completions.create(
  { model, prompt: "x", max_tokens: 1500, stream: true, ignore_eos: true }, { signal: controller.signal });
for await (const _ of endless) controller.abort(); // the iteration ends without an error

await assert.rejects(client.chat.completions.create({ model: "other", messages }), OpenAI.NotFoundError);
await assert.rejects(client.chat.completions.create({ model, messages, temperature: -1 }), OpenAI.BadRequestError);
console.log("ok");
