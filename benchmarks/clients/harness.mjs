// Cases of a client in JavaScript: each is a function that ends, or throws. Prints a line of JSON for each.

export const URL = `${process.env.SERVER_URL}/v1`;
export const MODEL = process.env.SERVER_MODEL;
export const KEY = process.env.SERVER_KEY;
const SECONDS = 60;

export function equal(found, wanted) {
  if (found !== wanted) throw new Error(`got ${JSON.stringify(found)}, not ${JSON.stringify(wanted)}`);
}

export function holds(text, word) {
  if (!(text ?? "").toLowerCase().includes(word.toLowerCase())) throw new Error(`${word} is not in ${JSON.stringify(text)}`);
}

export async function run(cases) {
  for (const [name, test] of Object.entries(cases)) {
    const told = { case: name, outcome: "passed" };
    let timer;
    const late = new Promise((_, reject) => {
      timer = setTimeout(() => reject(new Error(`took more than ${SECONDS} s`)), SECONDS * 1000);
    });
    try {
      await Promise.race([test(), late]);
    } catch (error) {
      const detail = error?.responseBody ?? "";
      Object.assign(told, { outcome: "failed", reason: `${error?.name}: ${error?.message} ${detail}`.split("\n")[0].slice(0, 300) });
    }
    clearTimeout(timer);
    console.log(JSON.stringify(told));
  }
  process.exit(0);
}
