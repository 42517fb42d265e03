// The openai package: the Responses API, streamed.
import OpenAI from "openai";

const [url, model, turns] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const parameters = {
  type: "object",
  properties: { path: { type: "string" } },
  required: ["path"],
  additionalProperties: false,
};
const tools = [{ type: "function", name: "read_file", description: "Read a file", parameters, strict: true }];
let input = [{ role: "user", content: "Read all files." }];
for (let turn = 0; turn <= Number(turns); turn++) {
  const instructions = "You read files. ".repeat(20);
  const stream = client.responses.stream({ model, instructions, input, tools, store: false });
  const response = await stream.finalResponse();
  const calls = response.output.filter((item) => item.type === "function_call");
  input = [...input, ...response.output];
  if (calls.length === 0) {
    console.log(response.output_text);
    break;
  }
  for (const call of calls) {
    const output = `A line of ${JSON.parse(call.arguments).path}. `.repeat(40);
    input.push({ type: "function_call_output", call_id: call.call_id, output });
  }
}
