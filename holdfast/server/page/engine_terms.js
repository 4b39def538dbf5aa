// The words of the engine view, each with an explanation that shows when it is pointed at or has the focus, and a list
// of the words that a reader meets first.

import { el } from './dom.js';

export const TERMS = {
  work: 'Share of the last five seconds in which the device computed.',
  pace: 'Time between two tokens of an answer. A step gives each stream one token, so this is the time of a step that has decodes.',
  waiting: 'Requests that have come and do not run yet, and why.',
  'kept state': 'What the model has computed of a text stays after its answer. A next turn that begins with that text need not compute it again. Each stored conversation, chat or completion counts as one; texts shorter than a block are not kept.',
  saved: 'Prompt tokens that were found in kept state, since the server started. They were not computed again.',
  stream: 'An answer that is being written.',
  step: 'One run of the model. It gives each stream its next token, and computes part of the prompts that join.',
  decode: 'The next token of one stream in a step.',
  prompt: 'What a request sends: the messages so far. Computing it (prefill) comes before the first token.',
  chunk: 'Part of a prompt that one step computes, so that a long prompt does not hold up the streams.',
  budget: 'Most tokens that one step may compute.',
  target: 'Longest time between two tokens that the server aims for (--tbt-target). The policy makes steps smaller to keep it.',
  block: 'A piece of the cache. It has the state (keys and values) of some tokens in a row of one text.',
  device: 'The memory of the GPU, or of the processor if there is none. Only state there can be computed with.',
  host: 'The main memory of the computer. State there is copied to the device when it is needed.',
  disk: 'The slowest tier of this computer. State there is read back before its conversation goes on.',
  dropped: 'State that was given up to make room. It is computed again if it is needed.',
  'retention value': 'Cost to compute a block again, divided by how long it has been idle, or times the worth of its turn. The lowest goes first.',
  'tokens a second': 'Tokens of all streams together, over the last five seconds.',
  'prompt tokens a second': 'Prompt tokens computed, over the last five seconds.',
  'steps a second': 'Runs of the model, over the last five seconds.',
  computing: 'Share of the last five seconds in which the device computed.',
  training: 'Share of the last five seconds in which the device trained.',
  'device blocks': 'Blocks on the device: in use by requests, kept for a next turn, and free.',
  'host blocks': 'Blocks kept in the main memory of the computer.',
  'copied a second': 'Blocks copied to the device and to the host, over the last five seconds.',
  'disk blocks': 'Blocks kept on the disk.',
  'prompt tokens found': 'Share of all prompt tokens that were found in kept state, and in which tier.',
  contracts: 'Promises about the time of requests: how many were kept, broken and refused.',
};

/** The words of the short list, in the order in which they build on each other. */
const LISTED = ['stream', 'step', 'decode', 'prompt', 'chunk', 'budget', 'target', 'block', 'device', 'host', 'disk', 'dropped', 'retention value'];

/** The list of words, for those who meet them first. */
export function wordList() {
  return el('dl', { class: 'e-terms' }, LISTED.map((name) => el('div', {}, el('dt', {}, name), el('dd', {}, TERMS[name]))));
}

/** Shows explanations of words at the place of the word, one at a time. */
export class Explainer {
  constructor(root) {
    this.root = root;
    this.shown = null; // the word that is explained
    this.tip = el('div', { class: 'e-gloss', role: 'tooltip', id: 'e-gloss', hidden: true });
    root.append(this.tip);
    root.addEventListener('keydown', (event) => {
      if (event.key === 'Escape') this.hide();
    });
  }

  /** A word that is explained when it is pointed at, touched, or has the focus; a plain text without an explanation. */
  term(name, label = name) {
    if (!TERMS[name]) return label;
    const word = el('button', {
      type: 'button', class: 'e-term',
      onpointerenter: () => this.show(word, name), onpointerleave: () => this.hide(),
      onfocus: () => this.show(word, name), onblur: () => this.hide(), onclick: () => this.show(word, name),
    }, label);
    return word;
  }

  show(word, name) {
    this.hide();
    this.shown = word;
    this.tip.textContent = TERMS[name];
    this.tip.hidden = false;
    word.setAttribute('aria-describedby', this.tip.id);
    const frame = this.root.getBoundingClientRect();
    const place = word.getBoundingClientRect();
    this.tip.style.left = `${Math.max(8, Math.min(place.left - frame.left, frame.width - this.tip.offsetWidth - 8))}px`;
    this.tip.style.top = `${place.bottom - frame.top + 6}px`;
  }

  hide() {
    this.shown?.removeAttribute('aria-describedby');
    this.shown = null;
    this.tip.hidden = true;
  }
}
