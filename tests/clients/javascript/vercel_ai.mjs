// The Vercel AI SDK (package ai) with its own tool loop. The fourth argument is the API: chat, responses or messages.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, name, turns, api] = process.argv.slice(2);
const options = { baseURL: `${url}/v1`, apiKey: "none" };
const models = {
  chat: () => createOpenAICompatible({ ...options, name: "stoker", includeUsage: true })(name),
  responses: () => createOpenAI(options).responses(name),
  messages: () => createAnthropic(options)(name),
};
const result = streamText({
  model: models[api](),
  maxRetries: 0,
  system: "You read files. ".repeat(20),
  prompt: "Read all files.",
  stopWhen: stepCountIs(Number(turns) + 2),
  onError: ({ error }) => {
    throw error;
  },
  tools: {
    read_file: tool({
      description: "Read a file",
      inputSchema: z.object({ path: z.string() }),
      execute: async ({ path }) => `A line of ${path}. `.repeat(40),
    }),
  },
});
console.log(await result.text);
