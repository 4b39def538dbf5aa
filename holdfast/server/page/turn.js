// Draws one turn: what was asked, the answer as it grows, its figures, and the buttons around them.

import { ToolItem, answerForm } from './artefacts.js';
import { copyText, el, icon, iconButton, place, renew } from './dom.js';
import { Markdown, codeBlock } from './markdown.js';
import { isRunning, textOf } from './tree.js';

const FILE = /^File "([^"\n]*)":\n```[^\n]*\n([\s\S]*)\n```$/;

const FIGURES = 'Time to the first token; tokens a second behind it; tokens of the answer; tokens of the prompt that were found in the cache';

/** The part of a message that holds a text file. */
export function filePart(name, text) {
  return `File "${name.replace(/["\n]/g, '')}":\n\`\`\`\n${text}\n\`\`\``;
}

/** One turn on the page. `actions` are the chat's: edit, retry, show(turn), answer(turn, outputs), and
 * beside(turn), a button or null. */
export class TurnView {
  constructor(turn, tree, actions) {
    this.turn = turn;
    this.actions = actions;
    this.parts = new Map(); // by item id: what draws it
    this.question = el('div', { class: 'question' });
    this.tools = el('div', { class: 'tools' });
    this.answer = el('div', { class: 'answer' });
    this.foot = el('div', { class: 'foot' });
    this.element = el('section', { class: 'turn', 'data-id': turn.id }, this.question, this.answer, this.foot);
    this.drawQuestion(tree);
    this.drawAnswer();
    this.drawFoot(tree);
  }

  drawQuestion(tree) {
    const { turn } = this;
    const name = (item) => (item.type === 'message' ? '' : tree.called(turn, item));
    const history = (turn.history ?? []).map((item) => drawnItem(item, name(item)));
    const parts = (turn.input ?? []).map((item) => drawnItem(item, name(item)));
    this.drawTools(tree);
    this.drawn = [...history, el('div', { class: 'asked' }, el('div', { class: 'asked-parts' }, parts), this.tools)];
    this.question.replaceChildren(...this.drawn);
  }

  /** The buttons beside the question. They change with the tree; an editor in the question's place stays. */
  drawTools(tree) {
    const { turn } = this;
    const questions = tree.questions(turn);
    renew(
      this.tools,
      [
        iconButton('copy', 'Copy the message', (event) => copy(event, (turn.input ?? []).map(textOf).join('\n\n')), { class: 'ghost small' }),
        (turn.input ?? []).some((item) => item.type === 'message') && iconButton('edit', 'Edit the message, as a new branch', () => this.edit(), { class: 'ghost small', 'data-action': 'edit' }),
        questions.length > 1 && switcher(questions, turn, 'question', (other) => this.actions.show(other)),
      ].filter(Boolean),
    );
  }

  /** Put an editor in the question's place, with another text than the question's if one is given. */
  edit(written = null) {
    const first = (this.turn.input ?? []).find((item) => item.type === 'message');
    const [text, ...files] = (first?.content ?? []).map((part) => part.text);
    const input = el('textarea', { class: 'field', 'aria-label': 'Edit the message', rows: 3, value: written ?? text ?? '' });
    const send = () => {
      if (input.value.trim()) this.actions.edit(this.turn, [input.value, ...files]);
    };
    const back = () => {
      this.question.replaceChildren(...this.drawn);
      this.question.querySelector('[data-action="edit"]')?.focus();
    };
    input.addEventListener('keydown', (event) => {
      if (event.key === 'Escape') {
        event.stopPropagation();
        back();
      } else if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send();
      }
    });
    this.question.replaceChildren(
      el('div', { class: 'editor' }, input,
        el('div', { class: 'dialog-actions' },
          el('button', { type: 'button', class: 'button', onclick: back }, 'Cancel'),
          el('button', { type: 'button', class: 'button primary', onclick: send }, 'Send'))),
    );
    input.style.height = `${Math.min(input.scrollHeight + 4, 320)}px`;
    input.focus();
    input.setSelectionRange(input.value.length, input.value.length);
  }

  /** Draw the answer as it is now. What has been drawn of it keeps its elements, and what the user opened stays open. */
  drawAnswer() {
    const { turn } = this;
    const output = (turn.output ?? []).map((item) => this.item(item).whole(item));
    const drawn = [...output, ...this.parts.values()].map((part) => part.element); // a stream that broke has no output
    const end = isRunning(turn) && drawn.length === 0 ? waiting() : noticeOf(turn);
    place(this.answer, end ? [...drawn, end] : drawn);
  }

  /** What draws an item of the answer. */
  item(item) {
    let part = this.parts.get(item.id);
    if (part) return part;
    this.answer.querySelector('.waiting')?.remove();
    part = item.type === 'message' || item.type === 'reasoning' ? new ItemView(item) : new ToolItem(item);
    this.parts.set(item.id, part);
    this.answer.append(part.element);
    return part;
  }

  drawFoot(tree) {
    const { turn } = this;
    const running = isRunning(turn);
    const answers = tree.answers(turn);
    this.element.classList.toggle('running', running);
    renew(
      this.foot,
      [
        answers.length > 1 ? switcher(answers, turn, 'answer', (other) => this.actions.show(other)) : null,
        running ? null : copyButton(turn),
        running ? null : iconButton('retry', 'Try again, as a new branch', () => this.actions.retry(turn), { class: 'ghost small', 'data-action': 'retry' }),
        this.actions.beside?.(turn),
        figures(turn),
      ].filter(Boolean),
    );
    this.drawForm(tree);
  }

  /** Fields for the outputs of the calls that nobody has answered. A form that is there keeps what is written in it. */
  drawForm(tree) {
    const calls = this.actions.answer ? tree.openCalls(this.turn) : [];
    if (calls.length === 0) {
      this.form?.remove();
      this.form = null;
    } else if (!this.form) {
      this.form = answerForm(calls, (outputs) => this.actions.answer(this.turn, outputs));
      this.answer.after(this.form);
    }
  }
}

/** How an answer ended, if it did not end well. */
function noticeOf(turn) {
  if (turn.status === 'failed') return el('p', { class: 'error notice' }, turn.error?.message ?? 'The answer failed.');
  if (turn.status === 'cancelled') return el('p', { class: 'muted notice' }, 'Stopped.');
  if (turn.status === 'incomplete') return el('p', { class: 'muted notice' }, 'Cut off at the most tokens of an answer.');
  return null;
}

/** An item of an answer as it grows: a message or reasoning. */
class ItemView {
  constructor(item) {
    this.text = '';
    this.body = el('div', { class: 'markdown' });
    this.summary = el('summary', {}, 'Reasoning');
    this.element = item.type === 'message' ? this.body : el('details', { class: 'reasoning' }, this.summary, this.body);
    this.markdown = new Markdown(this.body);
  }

  push(delta) {
    if (!this.text) this.summary.replaceChildren('Thinking ', dots());
    this.text += delta;
    this.markdown.update(this.text);
  }

  whole(item) {
    this.summary.replaceChildren('Reasoning');
    this.text = textOf(item);
    this.markdown.draw(this.text);
    return this;
  }
}

function waiting() {
  return el('p', { class: 'waiting muted' }, dots(), el('span', { class: 'sr' }, 'Waiting for the answer'));
}

/** Three dots that move while something is awaited. */
function dots() {
  return el('span', { class: 'dots', 'aria-hidden': 'true' }, el('i'), el('i'), el('i'));
}

function drawnItem(item, name) {
  if (item.type !== 'message') {
    const view = item.type === 'reasoning' ? new ItemView(item) : new ToolItem(item, name);
    view.whole(item);
    return view.element;
  }
  if (item.role === 'assistant') {
    const body = el('div', { class: 'markdown' });
    new Markdown(body).draw(textOf(item));
    return el('div', { class: 'answer' }, body);
  }
  const texts = (item.content ?? []).map((part) => part.text ?? '');
  const children = texts.map((text) => {
    const file = FILE.exec(text);
    if (!file) return el('div', { class: 'said' }, text);
    const facts = el('span', { class: 'facts' }, `${number(file[2].length)} characters`);
    return el('details', { class: 'file' }, el('summary', {}, icon('file'), el('span', { class: 'name' }, file[1]), facts), codeBlock(file[2], file[1].split('.').at(-1)));
  });
  const role = item.role === 'user' ? null : el('span', { class: 'role' }, item.role);
  return el('div', { class: 'bubble' }, role, children);
}

/** Goes through the versions of a question or an answer: ‹ 2/3 ›. */
function switcher(versions, turn, what, show) {
  const at = versions.indexOf(turn);
  const go = (by) => () => show(versions[at + by]);
  return el(
    'span',
    { class: 'switcher', role: 'group', 'aria-label': `Versions of the ${what}` },
    iconButton('left', `Version of the ${what} before`, go(-1), { class: 'ghost small', disabled: at === 0 }),
    el('span', { class: 'count' }, `${at + 1}/${versions.length}`),
    iconButton('right', `Next version of the ${what}`, go(1), { class: 'ghost small', disabled: at === versions.length - 1 }),
  );
}

const TIERS = { host: 'the host', disk: 'the disk', remote: 'the remote cache' };

/** The turn's times and tokens in words. */
export function figures(turn) {
  const { usage, timings } = turn;
  const said = [];
  if (Number.isFinite(timings?.first_token_ms)) said.push(`first token ${duration(timings.first_token_ms)}`);
  if (timings?.tokens_per_second > 0) said.push(`${Number(timings.tokens_per_second).toFixed(timings.tokens_per_second < 100 ? 1 : 0)} tokens/s`);
  if (usage) {
    said.push(`${number(usage.output_tokens)} tokens`);
    const details = usage.input_tokens_details ?? {};
    const cached = Number(details.cached_tokens ?? 0);
    const from = Object.entries(details.cached_tokens_by_tier ?? {}).filter(([tier, count]) => tier !== 'device' && count > 0);
    const tiers = from.length ? ` (${from.map(([tier, count]) => `${number(count)} from ${TIERS[tier] ?? tier}`).join(', ')})` : '';
    said.push(`${number(cached)} of ${number(usage.input_tokens)} cached${tiers}`);
  }
  return said.length ? el('span', { class: 'figures', title: FIGURES }, said.join(' · ')) : null;
}

const number = (count) => Number(count ?? 0).toLocaleString('en');
const duration = (ms) => (ms < 1000 ? `${Number(ms).toFixed(0)} ms` : `${(ms / 1000).toFixed(2)} s`);

/** A button that copies the text of an answer; null if it has none. */
export function copyButton(turn) {
  const text = (turn.output ?? []).filter((item) => item.type === 'message').map(textOf).join('\n\n');
  return text ? iconButton('copy', 'Copy the answer', (event) => copy(event, text), { class: 'ghost small' }) : null;
}

async function copy(event, text) {
  const button = event.currentTarget;
  button.replaceChildren(icon((await copyText(text)) ? 'check' : 'close'));
  setTimeout(() => button.replaceChildren(icon('copy')), 1500);
}
