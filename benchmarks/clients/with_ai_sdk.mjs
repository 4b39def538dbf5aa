// The Vercel AI SDK, over chat completions (@ai-sdk/openai-compatible) and Responses (@ai-sdk/openai).
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { KEY, MODEL, URL, equal, holds, run } from "./harness.mjs";

const prompt = "What is 2 plus 2?";
const person = z.object({ name: z.string().max(12), age: z.number().int().min(0).max(150) });
const apis = {
  "chat completions": createOpenAICompatible({
    name: "holdfast", baseURL: URL, apiKey: KEY, includeUsage: true, supportsStructuredOutputs: true,
  })(MODEL),
  Responses: createOpenAI({ baseURL: URL, apiKey: KEY }).responses(MODEL),
};
const cases = {};
for (const [api, model] of Object.entries(apis)) {
  const asked = { model, prompt, temperature: 0, maxOutputTokens: 256, maxRetries: 0 };
  const calls = [];
  const add = tool({
    description: "Add two numbers.",
    inputSchema: z.object({ a: z.number().int(), b: z.number().int() }),
    strict: true,
    execute: async ({ a, b }) => { calls.push(a, b); return a + b; },
  });
  cases[`generateText, ${api}`] = async () => {
    const { text, usage } = await generateText(asked);
    holds(text, "4");
    equal(usage.outputTokens > 0, true);
  };
  cases[`streamText, ${api}`] = async () => {
    let text = "";
    const result = streamText({ ...asked, onError: () => {} });
    for await (const part of result.fullStream) {
      if (part.type === "error") throw part.error;
      if (part.type === "text-delta") text += part.text;
    }
    holds(text, "4");
  };
  cases[`messages, ${api}`] = async () => {
    const { text } = await generateText({
      ...asked, prompt: undefined, messages: [
        { role: "user", content: "My name is Ada." },
        { role: "assistant", content: "Nice to meet you, Ada." },
        { role: "user", content: "What is my name?" },
      ],
    });
    holds(text, "Ada");
  };
  cases[`an object by its schema, ${api}`] = async () => {
    const { output } = await generateText({ ...asked, output: Output.object({ schema: person }) });
    person.parse(output);
  };
  cases[`an object, streamed, ${api}`] = async () => {
    const result = streamText({ ...asked, output: Output.object({ schema: person }), onError: () => {} });
    for await (const part of result.fullStream) if (part.type === "error") throw part.error;
    person.parse(await result.output);
  };
  cases[`a tool, ${api}`] = async () => {
    const { toolCalls } = await generateText({ ...asked, tools: { add }, toolChoice: "required" });
    equal(toolCalls[0].toolName, "add");
  };
  cases[`a tool, and an answer to its result, ${api}`] = async () => {
    calls.length = 0;
    const { steps } = await generateText({
      ...asked, tools: { add }, stopWhen: stepCountIs(2),
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
    });
    equal(steps.length, 2);
    equal(calls.length >= 2, true);
  };
}

await run(cases);
