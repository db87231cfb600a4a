// @anthropic-ai/sdk, unchanged, at the server whose address is the first argument: messages, streams, tools, counting.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";

const [url, model] = process.argv.slice(2);
const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "hi" }];
const tools = [{
  name: "paint",
  description: "Paint.",
  input_schema: {
    type: "object",
    properties: { color: { enum: ["red", "blue"] }, fast: { type: "boolean" } },
    required: ["color", "fast"],
    additionalProperties: false,
  },
}];
const isPaint = (input) => ["red", "blue"].includes(input.color) && typeof input.fast === "boolean";

const fixed = { model, messages, temperature: 0, max_tokens: 12, system: "be brief" };
const message = await client.messages.create(fixed);
const text = message.content.map((block) => block.text ?? "").join("");
const stream = client.messages.stream(fixed);
let streamed = "";
stream.on("text", (delta) => { streamed += delta; });
const final = await stream.finalMessage();
assert.equal(streamed, text);
assert.equal(final.stop_reason, message.stop_reason);
assert.equal(final.usage.output_tokens, message.usage.output_tokens);

const asked = {
  model, messages, tools, max_tokens: 200, tool_choice: { type: "any", disable_parallel_tool_use: true },
};
for (const answer of [await client.messages.create(asked), await client.messages.stream(asked).finalMessage()]) {
  assert.equal(answer.stop_reason, "tool_use");
  const [call] = answer.content;
  assert.ok(call.name === "paint" && isPaint(call.input));
  const result = [{ type: "tool_result", tool_use_id: call.id, content: "done" }];
  const history = [...messages, { role: "assistant", content: answer.content }, { role: "user", content: result }];
  const next = await client.messages.create({ model, tools, messages: history, max_tokens: 5, tool_choice: { type: "none" } });
  assert.ok(next.usage.output_tokens >= 1 && next.usage.output_tokens <= 5);
  const counted = await client.messages.countTokens({ model, tools, messages: history, tool_choice: { type: "none" } });
  assert.equal(counted.input_tokens, next.usage.input_tokens + (next.usage.cache_read_input_tokens ?? 0));
}

await assert.rejects(client.messages.create({ ...fixed, model: "other" }), Anthropic.NotFoundError);
console.log("ok");
