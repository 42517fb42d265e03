// The @anthropic-ai/sdk package, streamed.
import Anthropic from "@anthropic-ai/sdk";

const [url, model, turns] = process.argv.slice(2);
const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const input_schema = { type: "object", properties: { path: { type: "string" } }, required: ["path"] };
const tools = [{ name: "read_file", description: "Read a file", input_schema }];
const messages = [{ role: "user", content: "Read all files." }];
for (let turn = 0; turn <= Number(turns); turn++) {
  const system = "You read files. ".repeat(20);
  const stream = client.messages.stream({ model, max_tokens: 500, system, messages, tools });
  const answer = await stream.finalMessage();
  messages.push({ role: "assistant", content: answer.content });
  const calls = answer.content.filter((block) => block.type === "tool_use");
  if (calls.length === 0) {
    console.log(answer.content[0].text);
    break;
  }
  const results = calls.map((call) => ({
    type: "tool_result",
    tool_use_id: call.id,
    content: `A line of ${call.input.path}. `.repeat(40),
  }));
  messages.push({ role: "user", content: results });
}
