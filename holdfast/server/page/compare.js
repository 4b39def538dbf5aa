// Answers side by side: one message to several models or settings, in columns. Each answer is a stored branch of the
// conversation, and `metadata` says which ones belong together: {compare, column, variant}.

import { dialog, el, icon, iconButton, toast } from './dom.js';
import { Following, lost } from './following.js';
import * as tools from './tools.js';
import { asked, goesOn, isNew, isRunning } from './tree.js';
import { TurnView, copyButton, figures } from './turn.js';

const STORED = 'holdfast.compare';
const FEWEST = 2;
const MOST = 4;
const EFFORTS = ['', 'none', 'low', 'medium', 'high'];
const NUMBERS = { temperature: { label: 'Temperature', min: 0, max: 2, step: 0.05 }, top_p: { label: 'Top p', min: 0.01, max: 1, step: 0.01 } };

function load() {
  try {
    const found = JSON.parse(localStorage.getItem(STORED) ?? '[]');
    return Array.isArray(found) ? found.filter((each) => typeof each?.model === 'string').slice(0, MOST) : [];
  } catch {
    return [];
  }
}

function save(variants) {
  try {
    localStorage.setItem(STORED, JSON.stringify(variants));
  } catch {}
}

/** A variant in words: its model, and what differs from the settings. */
export function labelOf(variant) {
  const said = [variant.model ?? 'model'];
  for (const [name, { label }] of Object.entries(NUMBERS)) if (typeof variant[name] === 'number') said.push(`${label.toLowerCase()} ${variant[name]}`);
  if (variant.effort) said.push(`effort ${variant.effort}`);
  return said.join(', ');
}

/** The variant that an answer was asked for with. */
function variantOf(turn) {
  try {
    const found = JSON.parse(turn.metadata.variant);
    return typeof found === 'object' && found !== null ? found : { model: turn.model };
  } catch {
    return { model: turn.model };
  }
}

/** The fields of a request that a variant sets. */
function fieldsOf({ effort, ...fields }) {
  return effort ? { ...fields, reasoning: { effort } } : fields;
}

/** Several answers that are being written. For the chat it is like one Following. */
class Together {
  constructor(api) {
    this.api = api;
    this.followings = new Map(); // by turn, until the answer ends
    this.stopped = this.left = false;
  }

  add(turn, id = null) {
    const following = new Following(this.api, id);
    this.followings.set(turn, following);
    if (this.stopped) following.stop();
    if (this.left) following.leave();
    return following;
  }

  async stop() {
    this.stopped = true;
    await Promise.all([...this.followings.values()].map((each) => each.stop()));
  }

  leave() {
    this.left = true;
    for (const each of this.followings.values()) each.leave();
  }
}

export class Comparison {
  /** `chat` has the conversation: its tree, views, settings, and what is live. */
  constructor(chat) {
    this.chat = chat;
    this.variants = []; // what the next message goes to, if there are several
    this.last = load(); // what the last such message went to, as the browser keeps it
    this.open = new Map(); // by group: whether the user has it shown in columns
    this.views = new WeakMap(); // by turn, so that an answer that is being written keeps its text
    this.columns = new Map(); // by turn: what is drawn around its answer
    this.button = iconButton('columns', 'Answers side by side', () => this.edit());
    this.chips = el('div', { class: 'chips' });
  }

  /** Whether the next message gets several answers. */
  get on() {
    return this.variants.length > 1;
  }

  /** Let the user choose the models and settings. */
  async edit() {
    const { chat } = this;
    const chosen = await editVariants(this.on ? this.variants : this.last, chat.models, chat.fields.model);
    if (chosen) this.use(chosen);
    chat.input.focus();
  }

  use(variants) {
    this.variants = variants;
    if (this.on) save((this.last = variants));
    this.button.classList.toggle('on', this.on);
    this.button.setAttribute('aria-pressed', String(this.on));
    const end = () => {
      this.use([]);
      this.button.focus();
    };
    this.chips.replaceChildren(
      ...(this.on ? [el('span', { class: 'chip' }, icon('columns'), el('span', {}, variants.map(labelOf).join(' · ')), iconButton('close', 'One answer again', end, { class: 'ghost small' }))] : []),
    );
  }

  // ----- drawing

  isOpen(group) {
    const { tree } = this.chat;
    const decided = group.some((turn) => turn.id === tree.head || tree.children.get(turn.id).length > 0);
    return group.some(isRunning) || (this.open.get(group[0].metadata.compare) ?? !decided);
  }

  /** The columns that stand in the place of the last turn, and the views of their answers; null if it stands alone. */
  draw(turn, views) {
    const { chat } = this;
    const group = chat.tree.group(turn);
    if (group.length < 2 || !this.isOpen(group)) return null;
    const base = group.find((each) => each.id === chat.tree.head && goesOn(each)) ?? group.find(goesOn) ?? group[0];
    chat.tree.choose(base.id);
    chat.leaf = base.id;
    this.columns.clear();
    const drawn = group.map((each, at) => {
      const view = this.views.get(each) ?? views.get(each.id) ?? new TurnView(each, chat.tree, chat.actions);
      this.views.set(each, view);
      view.drawFoot(chat.tree);
      views.delete(each.id);
      views.set(each.id, view);
      return this.drawColumn(each, view, at);
    });
    const question = this.question?.turn === base ? this.question : new TurnView(base, chat.tree, chat.actions);
    this.question = question;
    question.drawTools(chat.tree);
    views.set('question', question); // the last one: its message is the one that can be edited
    this.note = el('p', { class: 'muted notice compare-note' });
    this.element = el('section', { class: 'turn compare', 'aria-label': 'Answers side by side' }, question.question, el('div', { class: `columns of-${group.length}` }, drawn), this.note);
    this.drawNote(group, base);
    return this.element;
  }

  /** Say what the next message follows. */
  drawNote(group, base) {
    if (!this.columns.has(base)) return; // the answer stands alone
    const written = group.filter(isRunning).length;
    this.note.textContent = written
      ? `${written} of ${group.length} answers are being written.`
      : goesOn(base) ? `The next message follows answer ${group.indexOf(base) + 1}, unless you choose another one.` : 'No answer can be followed. The next message takes the place of this one.';
  }

  drawColumn(turn, view, at) {
    const label = labelOf(variantOf(turn));
    const foot = el('div', { class: 'column-foot' });
    this.columns.set(turn, { foot, at });
    this.drawFoot(turn);
    return el('section', { class: 'answer-column', 'aria-label': `Answer ${at + 1}: ${label}` },
      el('h3', { class: 'column-name' }, el('span', { class: 'column-number' }, String(at + 1)), label), view.element, foot);
  }

  /** The buttons and figures below an answer. Keeps the focus if it was on one of them. */
  drawFoot(turn) {
    const { foot, at } = this.columns.get(turn) ?? {};
    if (!foot) return;
    const held = foot.contains(document.activeElement);
    const name = `answer ${at + 1}`;
    const running = isRunning(turn);
    const stop = () => this.chat.live?.followings?.get(turn)?.stop();
    foot.replaceChildren(
      ...[
        running ? el('button', { type: 'button', class: 'button small', 'aria-label': `Stop ${name}`, onclick: stop }, 'Stop') : null,
        goesOn(turn) ? el('button', { type: 'button', class: 'button small', 'aria-label': `Continue with ${name}`, onclick: () => this.choose(turn) }, 'Continue with this one') : null,
        running ? null : copyButton(turn),
        running ? null : iconButton('retry', `Try ${name} again`, () => this.again(turn), { class: 'ghost small' }),
        figures(turn),
      ].filter(Boolean),
    );
    if (held) foot.querySelector('button')?.focus();
  }

  /** A button that shows the columns again of which an answer was chosen; null where there are none. */
  opener(turn) {
    const { chat } = this;
    const group = chat.tree.group(turn);
    if (group.length < 2 || !group.includes(turn) || chat.leaf !== turn.id || chat.live) return null;
    const show = () => {
      this.open.set(turn.metadata.compare, true);
      chat.draw();
      this.element.querySelector('.column-foot button')?.focus();
    };
    return iconButton('columns', 'Show the answers side by side', show, { class: 'ghost small' });
  }

  // ----- asking

  turn(id, parent, input, metadata) {
    return { id, parent, input, output: [], status: 'queued', model: variantOf({ metadata }).model, metadata };
  }

  /** Ask all variants. Returns whether the server took one of the requests. `sibling` is as for Chat.send. */
  async send(items, parent, sibling) {
    const { chat } = this;
    const shown = chat.leaf;
    const compare = `${Date.now().toString(36)}${Math.random().toString(36).slice(2, 8)}`;
    const input = items.map((item) => ({ type: 'message', ...item }));
    const turns = this.variants.map((variant, column) =>
      this.turn(`new ${compare} ${column}`, parent, input, { compare, column: String(column), variant: JSON.stringify(variant) }));
    for (const turn of turns) chat.tree.add(turn);
    chat.leaf = turns[0].id;
    return this.ask(turns, sibling, () => {
      for (const turn of turns.slice(1)) chat.tree.remove(turn);
      chat.forget(turns[0], shown);
    });
  }

  /** Ask again for the answer of one column. The one before stays a branch. */
  async again(turn) {
    const { chat } = this;
    if (chat.isBusy()) return false;
    const fresh = this.turn(`new ${turn.metadata.compare} ${Date.now()}`, turn.parent, turn.input, turn.metadata);
    const shown = chat.leaf;
    chat.tree.add(fresh);
    if (isNew(turn)) chat.tree.remove(turn);
    if (shown === turn.id) chat.leaf = fresh.id;
    return this.ask([fresh], turn, () => {
      if (isNew(turn)) chat.tree.add(turn);
      chat.forget(fresh, shown);
    });
  }

  /** Ask for these answers. `forget` takes the turns away again if none of them can be asked for. */
  async ask(turns, sibling, forget) {
    const { chat } = this;
    const { run, tree } = chat;
    const live = (chat.live = new Together(chat.api));
    const common = { ...chat.fields, ...tools.asFields(chat.tools) };
    const [{ parent }] = turns;
    let conversation;
    chat.drawButton();
    chat.draw();
    chat.toEnd(true);
    try {
      conversation = await chat.ensureConversation(asked(turns[0]), run);
      await chat.moveHead(conversation.id, tree, parent, sibling);
    } catch (error) {
      toast(error.message, 'error');
      if (run === chat.run) {
        chat.live = null;
        forget();
      }
      return false;
    }
    const followings = turns.map((turn) => live.add(turn));
    live.ended = Promise.all(turns.map((turn, at) => {
      const body = {
        ...common, ...fieldsOf(variantOf(turn)), input: turn.input.map((item) => (item.type === 'message' ? { role: item.role, content: item.content } : item)),
        conversation: { id: conversation.id, branch: true }, background: true, stream: true, metadata: { ...turn.metadata, sent: String(Date.now()) },
      };
      return this.follow({ live: followings[at], turn, conversation, run }, '/v1/responses', { method: 'POST', body });
    }));
    await this.end(live, run);
    return followings.some(({ id }) => id !== null);
  }

  /** Go on showing the answers of a group of which one is being written. */
  async resume(turn, run) {
    const { chat } = this;
    const live = (chat.live = new Together(chat.api));
    const { conversation } = chat;
    chat.drawButton();
    const running = chat.tree.group(turn).filter(isRunning);
    live.ended = Promise.all(running.map((each) => this.follow({ live: live.add(each, each.id), turn: each, conversation, run }, `/v1/responses/${each.id}?stream=true`)));
    await this.end(live, run);
  }

  async follow({ live, turn, conversation, run }, path, options = {}) {
    const { chat } = this;
    try {
      for await (const event of live.events(path, options)) {
        if (event.type === 'response.created') chat.sidebar.touch(conversation);
        if (run !== chat.run) return;
        if (event.type === 'response.created') chat.named(turn, event.response);
        chat.happened(turn, event);
      }
    } catch (error) {
      if (live.left && live.id) return;
      if (live.left) toast(error.message, 'error');
      Object.assign(turn, { status: 'failed', error: live.id ? lost(error) : { message: error.message } });
    }
    if (run !== chat.run) return;
    chat.live?.followings?.delete(turn);
    chat.views.get(turn.id)?.drawAnswer();
    this.drawFoot(turn);
    const group = chat.tree.group(turn);
    this.drawNote(group, group.find(goesOn) ?? group[0]);
    chat.status.textContent = `Answer ${group.indexOf(turn) + 1} is ${turn.status === 'completed' ? 'complete' : turn.status}.`;
    chat.toEnd();
  }

  async end(live, run) {
    const { chat } = this;
    await live.ended;
    if (run !== chat.run || chat.live !== live) return;
    chat.live = null;
    chat.drawButton();
    chat.draw();
    chat.toEnd();
    chat.sidebar.touch(chat.conversation);
  }

  /** Go on from an answer. Those that are still being written are stopped, and keep their text. */
  async choose(turn) {
    const { chat } = this;
    const { run, live } = chat;
    await live?.stop();
    await live?.ended;
    if (run !== chat.run) return;
    try {
      await chat.api.post(`/v1/conversations/${chat.id}/head`, { after: turn.id });
    } catch (error) {
      if (run === chat.run) toast(error.message, 'error');
      return;
    }
    if (run !== chat.run) return;
    chat.tree.head = turn.id;
    this.open.set(turn.metadata.compare, false);
    chat.show(turn);
    chat.input.focus();
  }
}

/** Let the user choose 2 to 4 variants. Resolves with them, with an empty list to have one answer, or with null. */
function editVariants(before, models, model) {
  return dialog('Answers side by side', (finish) => {
    const list = el('div', { class: 'variants' });
    const rows = [];
    const add = (variant) => {
      const row = variantRow(variant, models, () => {
        rows.splice(rows.indexOf(row), 1);
        draw();
      });
      rows.push(row);
    };
    const more = el('button', { type: 'button', class: 'button more', onclick: () => {
      add({ model });
      draw();
      rows.at(-1).element.querySelector('select').focus();
    } }, 'Add an answer');
    const draw = () => {
      rows.forEach((row, at) => row.name(at + 1, rows.length > FEWEST));
      list.replaceChildren(...rows.map((row) => row.element));
      more.disabled = rows.length >= MOST;
    };
    const first = before.length >= FEWEST ? before : [{ model }, { model: models.find((each) => each !== model) ?? model }];
    first.forEach(add);
    draw();
    const submit = (event) => {
      event.preventDefault();
      finish(rows.map((row) => row.value()));
    };
    return el('form', { class: 'form', onsubmit: submit },
      el('p', { class: 'muted' }, 'Each message gets an answer from each of them at once. What is empty is as in the settings. All answers are kept as branches.'),
      list, more,
      el('div', { class: 'dialog-actions' },
        el('button', { type: 'button', class: 'button', onclick: () => finish([]) }, 'One answer'),
        el('button', { type: 'submit', class: 'button primary' }, 'Use')));
  });
}

/** The fields of one variant in the dialog. */
function variantRow(variant, models, remove) {
  const id = `variant-${Math.random().toString(36).slice(2)}`;
  const names = variant.model === undefined || models.includes(variant.model) ? models : [...models, variant.model];
  const model = el('select', { id: `${id}-model` }, names.map((each) => el('option', { value: each, selected: each === variant.model }, each)));
  const numbers = Object.entries(NUMBERS).map(([name, { label, ...limits }]) => {
    const input = el('input', { type: 'number', id: `${id}-${name}`, 'data-field': name, inputmode: 'decimal', value: variant[name] ?? '', ...limits });
    return { name, input, element: el('div', {}, el('label', { for: input.id }, label), input) };
  });
  const effort = el('select', { id: `${id}-effort` }, EFFORTS.map((each) => el('option', { value: each, selected: each === (variant.effort ?? '') }, each || 'as set')));
  const legend = el('legend');
  const drop = iconButton('close', '', remove, { class: 'ghost small' });
  const element = el('fieldset', { class: 'variant' }, legend,
    el('div', { class: 'variant-model' }, el('div', {}, el('label', { for: model.id }, 'Model'), model), drop),
    el('div', { class: 'variant-fields' }, numbers.map((each) => each.element), el('div', {}, el('label', { for: effort.id }, 'Reasoning effort'), effort)));
  return {
    element,
    name(at, removable) {
      legend.textContent = `Answer ${at}`;
      drop.hidden = !removable;
      drop.title = `Remove answer ${at}`;
      drop.setAttribute('aria-label', drop.title);
    },
    value() {
      const chosen = { model: model.value };
      for (const { name, input } of numbers) if (input.value !== '') chosen[name] = input.valueAsNumber;
      if (effort.value) chosen.effort = effort.value;
      return chosen;
    },
  };
}
