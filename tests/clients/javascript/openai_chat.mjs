// The openai package: its own tool loop over chat completions, streamed.
import OpenAI from "openai";

const [url, model, turns] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const parameters = { type: "object", properties: { path: { type: "string" } }, required: ["path"] };
const runner = client.chat.completions.runTools(
  {
    model,
    stream: true,
    messages: [
      { role: "system", content: "You read files. ".repeat(20) },
      { role: "user", content: "Read all files." },
    ],
    tools: [
      {
        type: "function",
        function: {
          name: "read_file",
          description: "Read a file",
          parameters,
          parse: JSON.parse,
          function: ({ path }) => `A line of ${path}. `.repeat(40),
        },
      },
    ],
  },
  { maxChatCompletions: Number(turns) + 2 },
);
console.log(await runner.finalContent());
