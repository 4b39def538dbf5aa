// openai-node: its calls over chat completions and Responses.
import { OpenAI } from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { KEY, MODEL, URL, equal, holds, run } from "./harness.mjs";

const client = new OpenAI({ baseURL: URL, apiKey: KEY, maxRetries: 0 });
const asked = { model: MODEL, messages: [{ role: "user", content: "What is 2 plus 2?" }], temperature: 0, max_tokens: 256 };
const Person = z.object({ name: z.string().max(12), age: z.number().int().min(0).max(150) });
const add = zodFunction({
  name: "add",
  description: "Add two numbers.",
  parameters: z.object({ a: z.number().int(), b: z.number().int() }),
  function: ({ a, b }) => String(a + b),
});

await run({
  "models.list": async () => {
    equal((await client.models.list()).data.map((model) => model.id).includes(MODEL), true);
  },
  "chat.completions.create": async () => {
    holds((await client.chat.completions.create(asked)).choices[0].message.content, "4");
  },
  "chat.completions.create, streamed": async () => {
    let text = "";
    for await (const chunk of await client.chat.completions.create({ ...asked, stream: true }))
      text += chunk.choices[0]?.delta?.content ?? "";
    holds(text, "4");
  },
  "chat.completions.stream, with usage": async () => {
    const stream = client.chat.completions.stream({ ...asked, stream_options: { include_usage: true } });
    holds(await stream.finalContent(), "4");
    equal((await stream.totalUsage()).completion_tokens > 0, true);
  },
  "chat.completions.create, log probabilities": async () => {
    const { choices } = await client.chat.completions.create({ ...asked, logprobs: true, top_logprobs: 2 });
    equal(choices[0].logprobs.content[0].top_logprobs.length, 2);
  },
  "chat.completions.parse": async () => {
    const answer = await client.chat.completions.parse({ ...asked, response_format: zodResponseFormat(Person, "person") });
    Person.parse(answer.choices[0].message.parsed);
  },
  "chat.completions.create, tools": async () => {
    const answer = await client.chat.completions.parse({ ...asked, tools: [add], tool_choice: "required" });
    const [call] = answer.choices[0].message.tool_calls;
    equal(call.function.name, "add");
    equal(typeof call.function.parsed_arguments.a, "number");
  },
  "completions.create": async () => {
    equal(typeof (await client.completions.create({ model: MODEL, prompt: "Hello", max_tokens: 8 })).choices[0].text, "string");
  },
  "responses.create": async () => {
    holds((await client.responses.create({ model: MODEL, input: "What is 2 plus 2?" })).output_text, "4");
  },
  "responses.stream": async () => {
    const stream = client.responses.stream({ model: MODEL, input: "What is 2 plus 2?" });
    let text = "";
    for await (const event of stream) if (event.type === "response.output_text.delta") text += event.delta;
    holds(text, "4");
    equal((await stream.finalResponse()).status, "completed");
  },
  "responses.parse": async () => {
    const answer = await client.responses.parse({
      model: MODEL, input: "I am Ada, 36 years old.", text: { format: zodTextFormat(Person, "person") },
    });
    Person.parse(answer.output_parsed);
  },
  "conversations": async () => {
    const conversation = await client.conversations.create({});
    await client.responses.create({ model: MODEL, input: "My name is Ada.", conversation: conversation.id });
    const answer = await client.responses.create({ model: MODEL, input: "What is my name?", conversation: conversation.id });
    holds(answer.output_text, "Ada");
  },
  "NotFoundError for a model that is not served": async () => {
    const error = await client.chat.completions.create({ ...asked, model: "other" }).catch((error) => error);
    equal(error instanceof OpenAI.NotFoundError, true);
  },
});
