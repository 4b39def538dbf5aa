// The tools that a model may call: the server's web search, and functions that the user answers by hand.

import { dialog, el } from './dom.js';

const STORED = 'holdfast.tools';
const CHOICES = { auto: 'The model decides', required: 'A tool must be called', none: 'No tool is called' };
const EXAMPLE = `[{"name": "forecast", "description": "The weather of a city",
  "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}]`;

export function load() {
  try {
    const found = JSON.parse(localStorage.getItem(STORED) ?? '{}');
    return { search: found.search === true, functions: readFunctions(found.functions ?? ''), choice: found.choice in CHOICES ? found.choice : 'auto', text: found.functions ?? '' };
  } catch {
    return { search: false, functions: [], choice: 'auto', text: '' };
  }
}

function save({ search, text, choice }) {
  try {
    localStorage.setItem(STORED, JSON.stringify({ search, functions: text, choice }));
  } catch {}
}

/** Function tools from JSON: a list, in the form of Responses or of chat completions. Throws Error with the reason. */
export function readFunctions(text) {
  if (!text.trim()) return [];
  let found;
  try {
    found = JSON.parse(text);
  } catch (error) {
    throw new Error(`This is not JSON: ${error.message}`);
  }
  return (Array.isArray(found) ? found : [found]).map((tool, at) => {
    const { type: _, ...given } = tool?.function ?? tool ?? {};
    if (typeof given.name !== 'string' || !given.name) throw new Error(`Function ${at + 1} has no name.`);
    return { type: 'function', ...given };
  });
}

/** The fields of a request that offer these tools. */
export function asFields({ search, functions, choice }) {
  const offered = [...(search ? [{ type: 'web_search' }] : []), ...functions];
  if (offered.length === 0) return {};
  return { tools: offered, ...(choice === 'auto' ? {} : { tool_choice: choice }) };
}

/** The names of these tools, for people. */
export function names({ search, functions }) {
  return [...(search ? ['web search'] : []), ...functions.map((each) => each.name)];
}

/** Let the user choose the tools. Resolves with them, or null. */
export function edit(before) {
  return dialog('Tools', (finish) => {
    const search = el('input', { type: 'checkbox', id: 'tools-search', checked: before.search });
    const functions = el('textarea', { id: 'tools-functions', rows: 7, spellcheck: 'false', class: 'mono', placeholder: EXAMPLE, value: before.text, 'aria-describedby': 'tools-hint tools-error' });
    const choice = el('select', { id: 'tools-choice' }, Object.entries(CHOICES).map(([value, label]) => el('option', { value, selected: value === before.choice }, label)));
    const error = el('p', { class: 'error', id: 'tools-error', role: 'alert' });
    const submit = (event) => {
      event.preventDefault();
      try {
        const chosen = { search: search.checked, functions: readFunctions(functions.value), choice: choice.value, text: functions.value };
        save(chosen);
        finish(chosen);
      } catch (failed) {
        error.textContent = failed.message;
        functions.setAttribute('aria-invalid', 'true');
        functions.focus();
      }
    };
    return el('form', { class: 'form', onsubmit: submit },
      el('label', { class: 'check' }, search, ' Web search, if the server has a search engine (--web-search)'),
      el('label', { for: 'tools-functions' }, 'Functions'),
      functions,
      el('span', { class: 'hint', id: 'tools-hint' }, 'A list in JSON. The page shows each call with its arguments, and you write the output.'),
      error,
      el('label', { for: 'tools-choice' }, 'When'),
      choice,
      el('div', { class: 'dialog-actions' }, el('button', { type: 'submit', class: 'button primary' }, 'Save')));
  });
}
