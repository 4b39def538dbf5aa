// The tools that a model may call: the server's web search, tools of MCP servers, which the server calls, and functions
// and custom tools, which the user answers by hand.

import { dialog, el } from './dom.js';

const STORED = 'holdfast.tools';
const CHOICES = { auto: 'The model decides', required: 'A tool must be called', none: 'No tool is called' };
const EXAMPLE = `[{"name": "forecast", "description": "The weather of a city",
  "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
 {"type": "mcp", "server_label": "sums", "server_url": "http://localhost:8000/mcp"}]`;

const KINDS = ['function', 'custom', 'mcp'];
const NAMES = { function: 'name', custom: 'name', mcp: 'server_label' };

export function load() {
  try {
    const found = JSON.parse(localStorage.getItem(STORED) ?? '{}');
    return { search: found.search === true, functions: readTools(found.functions ?? ''), choice: found.choice in CHOICES ? found.choice : 'auto', text: found.functions ?? '' };
  } catch {
    return { search: false, functions: [], choice: 'auto', text: '' };
  }
}

function save({ search, text, choice }) {
  try {
    localStorage.setItem(STORED, JSON.stringify({ search, functions: text, choice }));
  } catch {}
}

/** Tools from JSON: a list, in the form of Responses or of chat completions. Throws Error with the reason. */
export function readTools(text) {
  if (!text.trim()) return [];
  let found;
  try {
    found = JSON.parse(text);
  } catch (error) {
    throw new Error(`This is not JSON: ${error.message}`);
  }
  return (Array.isArray(found) ? found : [found]).map((tool, at) => {
    const { type = 'function', ...given } = tool ?? {};
    if (!KINDS.includes(type)) throw new Error(`Tool ${at + 1} has the type ${JSON.stringify(type)}; it must be ${KINDS.join(', ')}.`);
    const read = { type, ...(given[type] ?? given) };
    const name = NAMES[type];
    if (typeof read[name] !== 'string' || !read[name]) throw new Error(`Tool ${at + 1} has no ${name}.`);
    return read;
  });
}

/**
 * The tools of an earlier turn, to be offered again. A response does not show the whole address of an MCP server, nor its
 * token, so these come from the tools that are chosen here. Throws Error for a server that is not among them.
 */
export function again(offered, { functions }) {
  return offered.map((tool) => {
    if (tool.type !== 'mcp') return tool;
    const known = functions.find((each) => each.type === 'mcp' && each.server_label === tool.server_label);
    if (!known) throw new Error(`The MCP server ${tool.server_label} is not among the tools. Add it under Tools, with its address.`);
    return known;
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
  return [...(search ? ['web search'] : []), ...functions.map((each) => each[NAMES[each.type]])];
}

/** Let the user choose the tools. Resolves with them, or null. */
export function edit(before) {
  return dialog('Tools', (finish) => {
    const search = el('input', { type: 'checkbox', id: 'tools-search', checked: before.search });
    const functions = el('textarea', { id: 'tools-functions', rows: 8, spellcheck: 'false', class: 'mono', placeholder: EXAMPLE, value: before.text, 'aria-describedby': 'tools-hint tools-error' });
    const choice = el('select', { id: 'tools-choice' }, Object.entries(CHOICES).map(([value, label]) => el('option', { value, selected: value === before.choice }, label)));
    const error = el('p', { class: 'error', id: 'tools-error', role: 'alert' });
    const submit = (event) => {
      event.preventDefault();
      try {
        const chosen = { search: search.checked, functions: readTools(functions.value), choice: choice.value, text: functions.value };
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
      el('label', { for: 'tools-functions' }, 'Functions, custom tools and MCP servers'),
      functions,
      el('span', { class: 'hint', id: 'tools-hint' }, 'A list in JSON. You write the output of a function or a custom tool. The server calls the tools of an MCP server, if it allows its host (--mcp-allow); an access token here is kept in this browser.'),
      error,
      el('label', { for: 'tools-choice' }, 'When'),
      choice,
      el('div', { class: 'dialog-actions' }, el('button', { type: 'submit', class: 'button primary' }, 'Save')));
  });
}
