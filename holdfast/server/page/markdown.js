// Markdown to elements, without a string of markup on the way: marked only splits the text into tokens.

import { copyText, download, el, icon } from './dom.js';
import { formula } from './formula.js';
import { lex } from './math_lexer.js';
import Prism from './vendor/prism.js';

const LINKS = /^(https?:|mailto:)/i;
const HIGHLIGHTED = 60_000; // characters of code; what is longer stays plain
const DEEP = 40; // levels of nesting that are drawn
const ALIASES = { html: 'markup', xml: 'markup', svg: 'markup', js: 'javascript', mjs: 'javascript', ts: 'typescript', py: 'python', sh: 'bash', shell: 'bash', zsh: 'bash', console: 'bash', yml: 'yaml', rs: 'rust', rb: 'ruby', 'c++': 'cpp', 'c#': 'csharp', cs: 'csharp', kt: 'kotlin', golang: 'go', dockerfile: 'docker', make: 'makefile', tex: 'latex', md: 'markdown', tsx: 'jsx' };
const EXTENSIONS = { python: 'py', javascript: 'js', typescript: 'ts', bash: 'sh', shell: 'sh', rust: 'rs', ruby: 'rb', kotlin: 'kt', csharp: 'cs', markdown: 'md', markup: 'html', text: 'txt' }; // by language, where they differ
const ENTITIES = { amp: '&', lt: '<', gt: '>', quot: '"', apos: "'", nbsp: '\u00a0', copy: '©', hellip: '…', mdash: '—', ndash: '–', times: '×' };

/** Draws growing text into an element. Blocks that have not changed keep their elements. */
export class Markdown {
  constructor(element) {
    this.element = element;
    this.drawn = []; // the source of each child
    this.text = '';
    this.waiting = false;
  }

  /** Draw the text with the next frame. */
  update(text) {
    this.text = text;
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.draw(this.text);
    });
  }

  /** Draw the text now. */
  draw(text) {
    this.text = text;
    let tokens;
    try {
      tokens = lex(text).filter((token) => token.type !== 'space' && token.type !== 'def');
    } catch {
      tokens = [{ type: 'text', raw: text, text }]; // nested more deeply than the lexer can follow
    }
    let same = 0;
    while (same < tokens.length && this.drawn[same] === tokens[same].raw) same += 1;
    while (this.element.childNodes.length > same) this.element.lastChild.remove();
    for (const token of tokens.slice(same)) this.element.append(block(token, 0));
    this.drawn = tokens.map((token) => token.raw);
  }
}

function block(token, depth) {
  if (depth > DEEP) return el('p', {}, token.raw);
  switch (token.type) {
    case 'heading':
      return el(`h${Math.min(6, token.depth + 2)}`, {}, inline(token.tokens, depth));
    case 'paragraph':
      return el('p', {}, inline(token.tokens, depth));
    case 'code':
      return codeBlock(token.text, token.lang ?? '');
    case 'blockquote':
      return el('blockquote', {}, token.tokens.filter(drawn).map((child) => block(child, depth + 1)));
    case 'hr':
      return el('hr');
    case 'list':
      return list(token, depth);
    case 'table':
      return table(token, depth);
    case 'text':
      return el('span', {}, token.tokens ? inline(token.tokens, depth) : entities(token.text));
    case 'checkbox':
      return checkbox(token.checked);
    case 'formula':
      return formula(token);
    case 'source':
      return el('p', { class: 'source' }, token.raw);
    default:
      return el('p', {}, token.text ?? token.raw); // markup of the model's is text
  }
}

const drawn = (token) => token.type !== 'space' && token.type !== 'def';

function list(token, depth) {
  const items = token.items.map((item) =>
    el('li', { class: item.task ? 'task' : null }, item.tokens.filter(drawn).map((child) => block(child, depth + 1))),
  );
  if (!token.ordered) return el('ul', {}, items);
  return el('ol', { start: Number.isInteger(token.start) ? token.start : null }, items);
}

function table(token, depth) {
  const cell = (tag) => (one) => el(tag, { class: one.align ? `align-${one.align}` : null }, inline(one.tokens, depth));
  return el(
    'div',
    { class: 'table', tabindex: '0', role: 'region', 'aria-label': 'Table' },
    el(
      'table',
      {},
      el('thead', {}, el('tr', {}, token.header.map(cell('th')))),
      el('tbody', {}, token.rows.map((row) => el('tr', {}, row.map(cell('td'))))),
    ),
  );
}

function inline(tokens, depth) {
  if (depth > DEEP) return tokens.map((token) => token.raw);
  return tokens.map((token) => {
    switch (token.type) {
      case 'strong':
      case 'em':
      case 'del':
        return el(token.type, {}, inline(token.tokens, depth + 1));
      case 'codespan':
        return el('code', {}, token.text);
      case 'br':
        return el('br');
      case 'link':
        return link(token.href, token.title, inline(token.tokens, depth + 1));
      case 'image':
        return link(token.href, token.title, [`[image: ${token.text || token.href}]`]);
      case 'checkbox':
        return checkbox(token.checked);
      case 'text':
        return token.tokens ? inline(token.tokens, depth + 1) : entities(token.text);
      case 'escape':
        return token.text;
      case 'formula':
        return formula(token);
      default:
        return token.raw;
    }
  }).flat();
}

/** A link to the web or to an address of mail. Whatever else it names stays text. */
function link(href, title, children) {
  if (!LINKS.test(href)) return el('span', { title: href }, children);
  return el('a', { href, title: title || href, target: '_blank', rel: 'noopener noreferrer nofollow' }, children);
}

function checkbox(checked) {
  return el('span', { class: 'checkbox', role: 'img', 'aria-label': checked ? 'done' : 'to do' }, checked ? '☑ ' : '☐ ');
}

function entities(text) {
  return text.replace(/&(#x?[0-9a-f]{1,6}|[a-z]{2,6});/gi, (whole, name) => {
    if (name[0] !== '#') return ENTITIES[name] ?? whole;
    const code = name[1] === 'x' || name[1] === 'X' ? parseInt(name.slice(2), 16) : parseInt(name.slice(1), 10);
    return code > 0 && code < 0x110000 ? String.fromCodePoint(code) : whole;
  });
}

/** Code with its language, its colours and a button that copies it. */
export function codeBlock(text, info) {
  const name = info.trim().split(/\s/)[0].slice(0, 40);
  const code = el('code', {}, highlighted(text, name));
  const label = el('span', {}, 'Copy');
  const copy = el('button', { type: 'button', class: 'ghost small', onclick: () => copied(text, label) }, icon('copy'), label);
  const save = el('button', { type: 'button', class: 'ghost small', onclick: () => download(`code.${EXTENSIONS[name.toLowerCase()] ?? (/^[a-z0-9]{1,8}$/i.test(name) ? name : 'txt')}`, text) }, icon('down'), 'Download');
  const pre = el('pre', { tabindex: '0', role: 'region', 'aria-label': name ? `Code in ${name}` : 'Code' }, code);
  return el('div', { class: 'code' }, el('div', { class: 'code-head' }, el('span', {}, name || 'text'), el('span', { class: 'code-tools' }, save, copy)), pre);
}

async function copied(text, label) {
  label.textContent = (await copyText(text)) ? 'Copied' : 'Not allowed';
  setTimeout(() => (label.textContent = 'Copy'), 1500);
}

function highlighted(text, name) {
  const key = ALIASES[name.toLowerCase()] ?? name.toLowerCase();
  const grammar = Object.hasOwn(Prism.languages, key) ? Prism.languages[key] : null;
  if (grammar === null || typeof grammar !== 'object' || text.length > HIGHLIGHTED) return text;
  try {
    return spans(Prism.tokenize(text, grammar));
  } catch {
    return text;
  }
}

function spans(tokens) {
  return [tokens].flat().map((token) => (typeof token === 'string' ? token : el('span', { class: `t-${token.type}` }, spans(token.content))));
}
