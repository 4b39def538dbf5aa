// Shows what tools were asked and what they gave: calls with their arguments, web searches with the pages found, and
// outputs, as tables, text or code. Nothing of it is ever run. A function call can be answered by hand.

import { el } from './dom.js';
import { codeBlock } from './markdown.js';
import { ANSWERS } from './tree.js';

const DEEP = 3; // levels of nesting that are tables; what is deeper is JSON
const MOST_ROWS = 200; // of a table
const MOST_COLUMNS = 8;
const WIDE = 40; // characters of a text from which on its column is not squeezed
const LONG = 1500; // characters of an output from which on it is folded
const LINK = /^https?:\/\//i;
const PAGE = /^\s*(<!doctype html|<html|<svg|<\?xml)/i;

/** An item of a tool, as it grows: a call, a search, or an output. `name` is the function's, where an output has none. */
export class ToolItem {
  constructor(item, name = '') {
    this.name = name;
    this.language = item.type === 'custom_tool_call' ? 'text' : 'json';
    this.text = '';
    this.summary = el('summary');
    this.body = el('div', { class: 'artefact' });
    this.element = el('details', { class: 'call' }, this.summary, this.body);
    this.title(item);
  }

  title(item) {
    this.summary.replaceChildren(...[titleOf(item, this.name)].flat());
  }

  /** More of a call's arguments, or of its input. */
  push(delta) {
    if (!this.text) this.element.open = true;
    this.text += delta;
    this.body.replaceChildren(codeBlock(this.text, this.language));
  }

  /** The item as it is now. If that has been drawn, the elements stay, and so does what the user opened or closed. */
  whole(item) {
    const source = JSON.stringify(item);
    if (source === this.source) return this;
    this.source = source;
    this.title(item);
    this.body.replaceChildren(...[bodyOf(item)].flat());
    this.element.open = OPEN[item.type]?.(item) ?? false;
    return this;
  }
}

const OPEN = {
  function_call: () => true,
  custom_tool_call: () => true,
  mcp_approval_request: () => true,
  function_call_output: (item) => outputOf(item).length < LONG,
  custom_tool_call_output: (item) => outputOf(item).length < LONG,
};

function titleOf(item, name) {
  switch (item.type) {
    case 'function_call':
    case 'custom_tool_call':
      return ['Calls ', el('code', {}, item.name || '…')];
    case 'mcp_call':
      return ['Calls ', el('code', {}, item.name || '…'), ` at ${item.server_label}`, item.error ? ': the call failed' : ''];
    case 'mcp_list_tools':
      return `Tools of ${item.server_label}: ${item.tools?.length ?? 0}`;
    case 'mcp_approval_request':
      return ['Wants to call ', el('code', {}, item.name), ` at ${item.server_label}`];
    case 'mcp_approval_response':
      return [item.approve ? 'Approved' : 'Denied', ...(name ? [': ', el('code', {}, name)] : [])];
    case 'function_call_output':
    case 'custom_tool_call_output':
      return name ? ['Output of ', el('code', {}, name)] : 'Output of a tool';
    case 'web_search_call': {
      if (item.status === 'in_progress') return 'Searches the web…';
      const found = item.results?.length ?? 0;
      const query = item.action?.query ? ['Searched the web for ', el('q', {}, item.action.query)] : ['Searched the web'];
      return [...query, item.status === 'failed' ? ': the search failed' : `: ${found} ${found === 1 ? 'page' : 'pages'}`];
    }
    default:
      return item.type;
  }
}

function bodyOf(item) {
  switch (item.type) {
    case 'function_call':
    case 'mcp_approval_request':
      return argumentsView(item.arguments ?? '');
    case 'custom_tool_call':
      return textView(item.input ?? '');
    case 'mcp_call':
      return [argumentsView(item.arguments ?? ''), item.error ? el('p', { class: 'error' }, typeof item.error === 'string' ? item.error : (item.error.message ?? JSON.stringify(item.error))) : textView(outputOf(item))].flat();
    case 'mcp_list_tools':
      return valueView((item.tools ?? []).map((tool) => ({ name: tool.name, description: tool.description ?? '' })), 0);
    case 'mcp_approval_response':
      return el('p', { class: 'said' }, item.reason || (item.approve ? 'The call was approved.' : 'The call was denied.'));
    case 'function_call_output':
    case 'custom_tool_call_output':
      return textView(outputOf(item));
    case 'web_search_call':
      return item.results?.length ? el('ol', { class: 'found' }, item.results.map(foundPage)) : el('p', { class: 'muted' }, 'Nothing was found.');
    default: {
      const { id: _, ...rest } = item;
      return codeBlock(JSON.stringify(rest, null, 2), 'json');
    }
  }
}

/** The text of an output, which may come in parts. */
function outputOf({ output }) {
  if (Array.isArray(output)) return output.map((part) => part.text ?? JSON.stringify(part)).join('\n');
  return String(output ?? '');
}

function foundPage(page) {
  const url = String(page.url ?? '');
  const title = page.title || url;
  const text = page.text ?? page.content ?? page.snippet ?? '';
  return el('li', {},
    LINK.test(url) ? el('a', { href: url, target: '_blank', rel: 'noreferrer noopener' }, title) : el('span', {}, title),
    el('span', { class: 'found-place muted' }, url),
    text ? el('p', {}, text) : null);
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

function argumentsView(text) {
  const value = parsed(text);
  if (value === undefined || value === null || typeof value !== 'object') return codeBlock(text, 'json');
  if (Object.keys(value).length === 0) return el('p', { class: 'muted' }, 'No arguments.');
  return [valueView(value, 0), asJson(value)];
}

/** A tool's output: JSON as a table, a page or several lines as code to copy or download, and else text. */
function textView(text) {
  if (!text) return el('p', { class: 'muted' }, 'Empty.');
  const value = parsed(text);
  if (value !== undefined && value !== null && typeof value === 'object') return [valueView(value, 0), asJson(value)];
  if (PAGE.test(text)) return codeBlock(text, 'html');
  return text.includes('\n') ? codeBlock(text, 'text') : el('p', { class: 'said' }, text);
}

function asJson(value) {
  return el('details', { class: 'raw' }, el('summary', {}, 'As JSON'), codeBlock(JSON.stringify(value, null, 2), 'json'));
}

function scrolled(label, table) {
  return el('div', { class: 'table', tabindex: '0', role: 'region', 'aria-label': label }, table);
}

/** A value of JSON for people. */
function valueView(value, depth) {
  if (value === null || typeof value === 'number' || typeof value === 'boolean') return el('code', {}, String(value));
  if (typeof value === 'string') return value.includes('\n') ? codeBlock(value, PAGE.test(value) ? 'html' : 'text') : el('span', { class: value.length > WIDE ? 'said wide' : 'said' }, value);
  if (depth >= DEEP || (Array.isArray(value) ? value.length : Object.keys(value).length) > MOST_ROWS) return el('code', {}, JSON.stringify(value));
  if (Array.isArray(value)) return listView(value, depth);
  const rows = Object.entries(value).map(([name, each]) => el('tr', {}, el('th', { scope: 'row' }, name), el('td', {}, valueView(each, depth + 1))));
  const table = el('table', { class: 'values' }, el('tbody', {}, rows));
  return depth === 0 ? scrolled('Values', table) : table;
}

function listView(values, depth) {
  if (values.length === 0) return el('code', {}, '[]');
  const records = values.every((each) => typeof each === 'object' && each !== null && !Array.isArray(each));
  const names = records ? [...new Set(values.flatMap(Object.keys))] : [];
  if (names.length === 0 || names.length > MOST_COLUMNS) return el('ol', { class: 'values' }, values.map((each) => el('li', {}, valueView(each, depth + 1))));
  const table = el('table', { class: 'values' },
    el('thead', {}, el('tr', {}, names.map((name) => el('th', { scope: 'col' }, name)))),
    el('tbody', {}, values.map((each) => el('tr', {}, names.map((name) => el('td', {}, Object.hasOwn(each, name) ? valueView(each[name], depth + 1) : ''))))));
  return depth === 0 ? scrolled('Values', table) : table;
}

/** A field for the output of a call. */
function outputField(item) {
  const id = `answer-${item.id}`;
  const input = el('textarea', { id, class: 'field', rows: 2, spellcheck: 'false', placeholder: 'Text or JSON' });
  const read = () => ({ type: ANSWERS[item.type], call_id: item.call_id, output: input.value });
  return { read, element: [el('label', { for: id }, 'Output of ', el('code', {}, item.name)), input] };
}

/** Two buttons that decide whether a call is made. `read` is null until one is pressed. */
function approvalField(item, decided) {
  let approve = null;
  const choice = (label, value) => el('button', {
    type: 'button', class: 'button', 'aria-pressed': 'false', 'aria-label': `${label} ${item.name} at ${item.server_label}`,
    onclick: (event) => {
      approve = value;
      for (const each of event.currentTarget.parentElement.children) each.setAttribute('aria-pressed', String(each === event.currentTarget));
      decided();
    },
  }, label);
  const read = () => (approve === null ? null : { type: ANSWERS[item.type], approval_request_id: item.id, approve });
  const question = el('span', {}, 'May ', el('code', {}, item.name), ` be called at ${item.server_label}?`);
  return { read, element: el('div', { class: 'approval' }, question, el('span', { class: 'choices' }, choice('Approve', true), choice('Deny', false))) };
}

/**
 * Fields for the answers to calls. `send(items)` gets the answers as items, and resolves with whether they were taken.
 * If nothing but approvals is asked, they are sent as soon as the last one is decided.
 */
export function answerForm(items, send) {
  const button = el('button', { type: 'submit', class: 'button primary' }, items.length > 1 ? 'Send the answers' : 'Send the answer');
  const onlyApprovals = items.every((item) => item.type === 'mcp_approval_request');
  const ready = () => fields.every((each) => each.read() !== null);
  const decided = () => {
    button.disabled = !ready();
    if (onlyApprovals && ready()) form.requestSubmit();
  };
  const submit = async (event) => {
    event.preventDefault();
    if (form.inert || !ready()) return;
    form.inert = true;
    await send(fields.map((each) => each.read()));
    form.inert = false;
  };
  const fields = items.map((item) => (item.type === 'mcp_approval_request' ? approvalField(item, decided) : outputField(item)));
  button.disabled = !ready();
  const form = el('form', { class: 'form answer-form', onsubmit: submit }, fields.map((each) => each.element), onlyApprovals ? null : el('div', { class: 'dialog-actions' }, button));
  form.addEventListener('keydown', (event) => {
    if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  return form;
}
