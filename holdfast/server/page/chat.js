// Chat: conversations of the store, as trees of turns. A turn is a background response, so an answer goes on being
// written, and is found again, when the page is left.

import { Attachments } from './attachments.js';
import { Comparison } from './compare.js';
import { dialog, el, focusNamed, icon, iconButton, place, toast } from './dom.js';
import { Following, lost } from './following.js';
import * as settings from './settings.js';
import { Sidebar, titleOf } from './sidebar.js';
import * as tools from './tools.js';
import { Tree, asked, goesOn, isNew } from './tree.js';
import { TurnView, filePart } from './turn.js';

const NEAR_END = 90; // pixels from the end within which the thread follows the answer
const SLOW = 500; // milliseconds after which a conversation that is not there yet is said to be on its way
const SHORTCUTS = [
  ['Enter', 'Send'],
  ['Shift Enter', 'New line'],
  ['Esc', 'Stop the answer'],
  ['↑ in an empty message', 'Edit the last message'],
  ['Alt R', 'Try the last answer again'],
  ['Alt C', 'Answers side by side'],
  ['Alt N', 'New chat'],
  ['Ctrl K', 'Search the conversations'],
  ['Alt ↑, Alt ↓', 'Previous, next conversation'],
  ['Alt B', 'Show or hide the conversations'],
  ['/', 'Write a message'],
  ['?', 'This list'],
];

class Chat {
  constructor(root, api) {
    this.root = root;
    this.api = api;
    this.models = [];
    this.absent = false;
    this.contexts = new Map(); // by model: the most tokens that it reads
    this.settings = settings.of(null);
    this.own = false; // whether the settings are for this conversation only
    this.tools = tools.load();
    this.id = null; // of the conversation; null for a new chat
    this.conversation = null; // null also while it is loaded
    this.loading = null; // settles when the conversation has been loaded
    this.tree = new Tree();
    this.leaf = null; // the last turn that is shown
    this.views = new Map();
    this.run = 0; // only what began with the latest one may draw
    this.live = null; // what is being written: a Following, or several side by side
    this.build();
  }

  build() {
    this.sidebar = new Sidebar(this.api, this);
    this.title = el('h2', { class: 'thread-title' }, 'New chat');
    this.column = el('div', { class: 'column' });
    this.column.addEventListener('click', (event) => {
      if (event.target.closest('summary')) this.follows = false; // what opens is what the user wants to see
    });
    this.thread = el('div', { class: 'thread', tabindex: '0', role: 'region', 'aria-label': 'Conversation', onscroll: () => this.scrolled() }, this.column);
    this.follows = true;
    this.top = 0; // where the thread was scrolled to last
    this.sizes = new ResizeObserver(() => this.toEnd());
    for (const each of [this.column, this.thread]) this.sizes.observe(each);
    this.down = iconButton('down', 'Go to the end', () => this.toEnd(true), { class: 'ghost to-end', hidden: true });
    this.status = el('div', { class: 'sr', role: 'status' });
    this.input = el('textarea', {
      class: 'message', rows: 1, placeholder: 'Message', 'aria-label': 'Message',
      oninput: () => this.grow(), onkeydown: (event) => this.typed(event),
    });
    this.comparison = new Comparison(this);
    this.toolsButton = iconButton('tools', 'Tools', () => this.changeTools());
    this.button = el('button', { type: 'button', class: 'send', onclick: () => (this.live ? this.stop() : this.submit()) });
    this.model = el('button', { type: 'button', class: 'ghost model', title: 'Settings', onclick: () => this.changeSettings() });
    this.composer = el('div', { class: 'composer' });
    this.pane = el('div', { class: 'thread-pane' });
    this.attachments = new Attachments({
      api: this.api, area: this.pane, input: this.input, changed: () => this.drawButton(),
      model: () => this.fields.model, context: () => this.contexts.get(this.fields.model) ?? 0,
    });
    this.composer.append(
      this.comparison.chips,
      this.attachments.chips,
      this.attachments.note,
      this.input,
      el('div', { class: 'composer-foot' },
        this.attachments.button,
        this.attachments.picker,
        this.comparison.button,
        this.toolsButton,
        this.model,
        el('span', { class: 'space' }),
        this.button),
    );
    this.toggle = iconButton('menu', 'Show or hide the conversations', () => this.showSidebar(), { 'aria-expanded': 'true' });
    this.branches = iconButton('branches', 'Branches', () => this.showBranches(), { hidden: true });
    const head = el('div', { class: 'thread-head' }, this.toggle, this.title, el('span', { class: 'space' }),
      this.branches,
      iconButton('keyboard', 'Keyboard shortcuts', () => this.showShortcuts(), { class: 'ghost for-keys' }),
      iconButton('settings', 'Settings', () => this.changeSettings()));
    this.pane.append(head, this.thread, el('div', { class: 'composer-box' }, this.down, this.composer), this.status);
    this.scrim = el('div', { class: 'scrim', onclick: () => this.showSidebar(false) });
    this.frame = el('div', { class: 'chat' }, this.sidebar.element, this.scrim, this.pane);
    this.root.append(this.frame);
    this.narrow = window.matchMedia('(max-width: 820px)');
    this.showSidebar(!this.narrow.matches);
    this.onkey = (event) => this.key(event);
    this.onhash = () => this.fromAddress();
    this.onnewkey = () => this.sidebar.reload();
    document.addEventListener('keydown', this.onkey);
    window.addEventListener('hashchange', this.onhash);
    this.api.onKey.push(this.onnewkey);
    this.drawButton();
    this.drawTools();
  }

  /** Load what there is. A message that is sent before that has ended waits for it. */
  begin() {
    this.ready = this.loadAll();
    return this.ready;
  }

  async loadAll() {
    await this.loadModels();
    if (this.absent) return this.explain();
    await this.sidebar.reload();
    await this.fromAddress();
    this.focusInput();
  }

  /** Let the user write. Not on a touch screen, where a keyboard would cover half of what the user wants to read. */
  focusInput() {
    if (!matchMedia('(hover: none)').matches) this.input.focus();
  }

  end() {
    this.run += 1;
    this.live?.leave();
    this.sizes.disconnect();
    document.removeEventListener('keydown', this.onkey);
    window.removeEventListener('hashchange', this.onhash);
    this.api.onKey.splice(this.api.onKey.indexOf(this.onnewkey), 1);
  }

  async loadModels() {
    try {
      const { data } = await this.api.get('/v1/models');
      this.models = data.map((model) => model.id);
      this.contexts = new Map(data.map((model) => [model.id, model.max_model_len]));
    } catch (error) {
      if (error.status === 404) this.absent = true; // the server has applications of cells alone
      else toast(error.message, 'error');
    }
    this.drawModel();
  }

  /** Say why there is nothing to chat with, in place of the list and the field of the message. */
  explain() {
    document.removeEventListener('keydown', this.onkey);
    this.frame.replaceChildren(el('div', { class: 'thread-pane' }, el('div', { class: 'column welcome' },
      el('p', { class: 'hello' }, 'No chat on this server'),
      el('p', { class: 'muted' }, 'This server has no language model. Its applications answer at routes under /v2: see ', el('a', { href: 'docs' }, 'the list of routes'), '.'))));
  }

  /** The fields of the next request that the settings ask for. */
  get fields() {
    return settings.asFields(this.settings, this.models);
  }

  drawModel() {
    const preset = settings.presetOf(this.settings);
    const chosen = preset === null ? 'own settings' : settings.BUILT_IN[0] === preset ? null : preset.name;
    this.model.replaceChildren([this.fields.model ?? 'no model', chosen].filter(Boolean).join(' · '));
    this.model.title = this.own ? 'Settings of this chat' : 'Settings';
  }

  useSettings() {
    this.settings = settings.of(this.id);
    this.own = settings.ownOf(this.id) !== null;
    this.drawModel();
  }

  // ----- which conversation

  async fromAddress() {
    const [view, id] = location.hash.slice(1).split('/');
    if (view === 'engine') return;
    await (this.loading = this.load(/^conv_\w{1,60}$/.test(id ?? '') ? id : null));
  }

  /** Open a conversation, or begin a new one. */
  open(id) {
    const hash = id ? `#chat/${id}` : '#chat';
    if (this.narrow.matches) this.showSidebar(false);
    if (location.hash === hash || (!id && location.hash === '')) this.fromAddress();
    else location.hash = hash;
    this.focusInput();
  }

  async load(id) {
    if (id !== null && id === this.id) return;
    const run = (this.run += 1);
    this.live?.leave();
    this.live = null;
    this.id = id;
    this.conversation = this.sidebar.conversations.get(id) ?? null;
    this.tree = new Tree();
    this.leaf = null;
    this.useSettings();
    this.sidebar.select(id);
    this.drawTitle();
    this.drawButton();
    if (id === null) {
      this.draw();
      return;
    }
    this.column.replaceChildren();
    const slow = setTimeout(() => {
      if (run === this.run) this.column.replaceChildren(el('p', { class: 'muted notice' }, 'Loading the conversation…'));
    }, SLOW);
    try {
      const told = await this.api.get(`/v1/conversations/${id}/turns`);
      if (run !== this.run) return;
      this.conversation ??= await this.api.get(`/v1/conversations/${id}`);
      if (run !== this.run) return;
      clearTimeout(slow);
      this.tree = new Tree(told.turns, told.head);
      if (told.head) this.tree.choose(told.head);
      const running = told.turns.find((turn) => turn.running);
      if (running) this.tree.choose(running.id);
      this.leaf = this.tree.leafBelow(null);
      this.drawTitle();
      this.draw();
      this.toEnd(true);
      if (told.turns.length === 0) await this.showItems(run);
      if (running?.metadata?.compare) this.comparison.resume(running, run);
      else if (running) {
        this.live = new Following(this.api, running.id);
        this.drawButton();
        const { live, conversation } = this;
        this.follow({ live, turn: running, conversation, run }, `/v1/responses/${running.id}?stream=true`);
      }
    } catch (error) {
      if (run !== this.run) return;
      clearTimeout(slow);
      this.column.replaceChildren(el('p', { class: 'error notice' }, error.message));
    }
  }

  /** Show what a conversation without turns has: the items that it was created with. */
  async showItems(run) {
    const items = (await this.api.get(`/v1/conversations/${this.id}/items?order=asc&limit=100`)).data;
    if (run !== this.run || items.length === 0) return;
    const view = new TurnView({ id: '', parent: null, input: items, output: [], status: 'completed' }, new Tree(), {});
    view.question.querySelector('.tools').remove();
    this.column.replaceChildren(view.question);
  }

  drawTitle() {
    const title = this.id ? titleOf(this.conversation ?? {}) : 'New chat';
    this.title.textContent = title;
    document.title = this.id ? `${title} · Holdfast` : 'Holdfast';
  }

  renamed(conversation) {
    if (conversation.id !== this.id) return;
    this.conversation = conversation;
    this.drawTitle();
  }

  /** A conversation is about to be deleted. */
  async closing(id) {
    if (id === this.id && this.live) await this.stop();
  }

  closed(id) {
    settings.keepFor(id, null);
    if (id === this.id) this.open(null);
  }

  // ----- the thread

  draw() {
    const path = this.tree.path(this.leaf);
    const views = new Map();
    for (const turn of path) {
      const known = this.views.get(turn.id);
      if (known?.turn === turn) {
        known.drawTools(this.tree);
        known.drawFoot(this.tree);
      }
      views.set(turn.id, known?.turn === turn ? known : new TurnView(turn, this.tree, this.actions));
    }
    this.views = views;
    const beside = this.comparison.draw(path.at(-1), views);
    const elements = path.map((turn) => views.get(turn.id).element);
    if (path.length === 0) elements.push(this.welcome());
    place(this.column, beside ? [...elements.slice(0, -1), beside] : elements);
    this.column.classList.toggle('wide', beside !== null);
    this.branches.hidden = this.tree.turns.size <= path.length;
  }

  welcome() {
    return el('div', { class: 'welcome' }, el('p', { class: 'hello' }, 'What shall we talk about?'),
      el('p', { class: 'muted' }, 'Every conversation is kept on this server. Edit a message or try again, and both versions stay.'));
  }

  get actions() {
    return {
      show: (turn) => this.show(turn),
      retry: (turn) => this.retry(turn),
      edit: (turn, texts) => this.edit(turn, texts),
      answer: (turn, outputs) => this.answer(turn, outputs),
      beside: (turn) => this.comparison.opener(turn),
    };
  }

  /** Show the branch of a turn. */
  show(turn) {
    this.tree.choose(turn.id);
    this.leaf = this.tree.leafBelow(turn.id);
    const before = this.views.get(turn.id) ?? [...this.views.values()].find((view) => view.turn.parent === turn.parent);
    const top = before?.element.getBoundingClientRect().top;
    const held = before?.element.contains(document.activeElement) ? document.activeElement : null;
    this.draw();
    const after = this.views.get(turn.id)?.element;
    if (top !== undefined && after) this.thread.scrollTop += after.getBoundingClientRect().top - top;
    if (held && after) focusNamed(after, held);
  }

  scrolled() {
    const { scrollTop, clientHeight, scrollHeight } = this.thread;
    const atEnd = scrollTop + clientHeight > scrollHeight - NEAR_END;
    // What is not drawn yet has an estimated height. If it grows, the end moves away; only the user scrolls back.
    if (atEnd) this.follows = true;
    else if (scrollTop < this.top) this.follows = false;
    this.top = scrollTop;
    this.down.hidden = atEnd;
  }

  toEnd(always = false) {
    if (!always && !this.follows) return;
    this.thread.scrollTop = this.thread.scrollHeight;
    if (always) this.follows = true;
  }

  // ----- asking

  grow() {
    this.input.style.height = 'auto';
    this.input.style.height = `${Math.min(this.input.scrollHeight, 240)}px`;
    this.drawButton();
  }

  drawButton() {
    const name = this.live ? 'Stop' : 'Send';
    this.button.replaceChildren(icon(this.live ? 'stop' : 'send'));
    this.button.setAttribute('aria-label', name);
    this.button.title = name;
    this.button.disabled = !this.live && (!this.input.value.trim() || this.attachments.reading);
  }

  typed(event) {
    if (event.isComposing) return;
    if (event.key === 'Enter' && !event.shiftKey) {
      event.preventDefault();
      if (!this.live) this.submit();
    } else if (event.key === 'ArrowUp' && !this.input.value && !event.altKey) {
      const last = [...this.views.values()].at(-1);
      if (last && !this.live) {
        event.preventDefault();
        last.edit();
      }
    }
  }

  async submit() {
    await this.ready;
    const { run } = this;
    await this.loading;
    if (run !== this.run) return;
    const text = this.input.value.trim();
    if (!text || this.live || this.attachments.reading) return;
    const files = this.attachments.take();
    const sent = [text, ...files.map((file) => filePart(file.name, file.text))];
    this.input.value = '';
    this.grow();
    if (!(await this.send(sent, this.tree.base(this.leaf)?.id ?? null))) {
      // Nothing was taken: let the user send it again, before what was written meanwhile.
      this.input.value = [text, this.input.value].filter(Boolean).join('\n\n');
      this.attachments.restore(files);
      this.grow();
    }
  }

  /** Send another version of a message. If the server does not take it, the editor comes back. */
  async edit(turn, texts) {
    if (!this.live) this.focusInput();
    if (!(await this.send(texts, turn.parent, turn))) [...this.views.values()].findLast((view) => view.turn === turn)?.edit(texts[0]);
  }

  retry(turn) {
    if (!this.live) this.focusInput();
    const input = turn.input.map((item) => (item.type === 'message' ? { role: item.role, content: item.content } : item));
    return this.send(null, turn.parent, turn, input);
  }

  /** Go on from a turn with the outputs of its function calls, with the same tools. */
  async answer(turn, outputs) {
    try {
      const { tools: offered } = await this.api.get(`/v1/responses/${turn.id}`);
      const fields = offered?.length ? { tools: tools.again(offered, this.tools) } : {};
      this.input.focus(); // the form goes away
      return await this.send(null, turn.id, null, outputs, fields);
    } catch (error) {
      toast(error.message, 'error');
      return false;
    }
  }

  /** Whether an answer is being written here, which the user is told. */
  isBusy() {
    if (this.live) toast('An answer is being written. Stop it, or wait for its end.');
    return this.live !== null;
  }

  /**
   * Ask below a turn (null: at the beginning). `sibling` is the turn that this one stands beside, if there is one.
   * The message is sent even if the user opens another chat meanwhile. Returns whether the server took the request.
   */
  async send(texts, parent, sibling = null, input = null, fields = tools.asFields(this.tools)) {
    if (this.isBusy()) return false;
    const { run, tree } = this;
    const asking = { ...this.fields, ...fields };
    const items = input ?? [{ role: 'user', content: texts.map((text) => ({ type: 'input_text', text })) }];
    if (input === null && this.comparison.on) return this.comparison.send(items, parent, sibling);
    const live = (this.live = new Following(this.api));
    this.drawButton();
    const turn = { id: 'new', parent, input: items.map((item) => ({ type: 'message', ...item })), output: [], status: 'queued', metadata: {} };
    const shown = this.leaf;
    tree.add(turn);
    this.leaf = turn.id;
    this.draw();
    this.toEnd(true);
    try {
      const conversation = await this.ensureConversation(asked(turn), run);
      await this.moveHead(conversation.id, tree, parent, sibling);
      const body = {
        ...asking, input: items, conversation: conversation.id,
        background: true, stream: true, metadata: { sent: String(Date.now()) },
      };
      await this.follow({ live, turn, conversation, run }, '/v1/responses', { method: 'POST', body });
      return true;
    } catch (error) {
      toast(error.message, 'error');
      if (run === this.run) {
        this.live = null;
        this.forget(turn, shown);
      }
      return false;
    }
  }

  /** Take a turn away again that the server did not take. */
  forget(turn, shown) {
    this.tree.remove(turn);
    if (this.tree.get(shown)) this.tree.choose(shown);
    this.leaf = this.tree.get(shown) ? shown : this.tree.leafBelow(null);
    this.draw();
    this.drawButton();
  }

  /** The conversation of this chat. A new chat gets one, named after its first message. */
  async ensureConversation(text, run) {
    const { id, own, settings: chosen } = this;
    if (id !== null) return this.conversation ?? { id };
    const line = [...text.trim().split('\n')[0]];
    const title = line.length > 60 ? `${line.slice(0, 57).join('').trimEnd()}…` : line.join('');
    const made = await this.api.post('/v1/conversations', { metadata: { title } });
    if (own) settings.keepFor(made.id, chosen);
    if (run !== this.run) return made;
    this.id = made.id;
    this.conversation = made;
    this.sidebar.selected = made.id;
    history.replaceState(null, '', `#chat/${made.id}`);
    this.drawTitle();
    return made;
  }

  /** Have a conversation go on from `parent`, where it does not yet. */
  async moveHead(id, tree, parent, sibling) {
    if (tree.head === parent) return;
    const beside = [sibling, ...tree.siblings({ parent })].find((turn) => turn && !isNew(turn));
    const wanted = parent !== null && goesOn(tree.get(parent)) ? { after: parent } : beside ? { before: beside.id } : null;
    if (wanted === null) return;
    await this.api.post(`/v1/conversations/${id}/head`, wanted);
    tree.head = parent;
  }

  /** Draw an answer as its events come. Throws if the server does not take the request. */
  async follow({ live, turn, conversation, run }, path, options = {}) {
    try {
      for await (const event of live.events(path, options)) {
        if (event.type === 'response.created') this.sidebar.touch(conversation);
        if (run !== this.run) return;
        if (event.type === 'response.created') this.named(turn, event.response);
        this.happened(turn, event);
      }
    } catch (error) {
      if (live.id === null) throw error; // it was never taken
      if (live.left) return;
      Object.assign(turn, { status: 'failed', error: lost(error) });
    }
    if (run !== this.run) return;
    this.live = null;
    this.drawButton();
    this.views.get(turn.id)?.drawAnswer();
    this.draw();
    this.status.textContent = turn.status === 'completed' ? 'The answer is complete.' : `The answer is ${turn.status}.`;
    this.sidebar.touch(conversation);
  }

  /** Give a new turn the id of its response. */
  named(turn, response) {
    if (!isNew(turn)) return;
    const view = this.views.get(turn.id);
    this.views.delete(turn.id);
    if (this.leaf === turn.id) this.leaf = response.id;
    this.tree.rename(turn, response.id);
    Object.assign(turn, { status: response.status, created_at: response.created_at, model: response.model });
    if (view) {
      view.element.dataset.id = turn.id;
      this.views.set(turn.id, view);
    }
  }

  /** Take in one event of an answer. */
  happened(turn, event) {
    const view = this.views.get(turn.id);
    switch (event.type) {
      case 'response.output_item.added':
        turn.status = 'in_progress';
        if (event.item.type !== 'message') view?.item(event.item);
        break;
      case 'response.output_item.done':
        view?.item(event.item).whole(event.item);
        break;
      case 'response.output_text.delta':
      case 'response.reasoning_text.delta':
      case 'response.function_call_arguments.delta':
      case 'response.custom_tool_call_input.delta': {
        const type = { output_text: 'message', reasoning_text: 'reasoning' }[event.type.split('.')[1]] ?? 'function_call';
        view?.item({ id: event.item_id, type, name: '' }).push(event.delta);
        break;
      }
      case 'response.completed':
      case 'response.incomplete':
      case 'response.failed': {
        const { status, output, usage, timings, error } = event.response;
        Object.assign(turn, { status, output, usage, timings, error });
        if (!turn.metadata?.compare && (status === 'completed' || status === 'incomplete')) this.tree.head = turn.id;
        break;
      }
    }
  }

  /** Stop the answer that is being written. What there is of it stays. */
  async stop() {
    await this.live?.stop();
  }

  // ----- around it

  async changeTools() {
    this.tools = (await tools.edit(this.tools)) ?? this.tools;
    this.drawTools();
    this.input.focus();
  }

  drawTools() {
    const names = tools.names(this.tools);
    const label = names.length ? `Tools: ${names.join(', ')}` : 'Tools';
    this.toolsButton.title = label;
    this.toolsButton.setAttribute('aria-label', label);
    this.toolsButton.classList.toggle('on', names.length > 0);
  }

  async changeSettings() {
    const { editSettings } = await import('./settings_dialog.js');
    const chosen = await editSettings({ api: this.api, settings: this.settings, own: this.own, models: this.models });
    if (chosen) this.changed(chosen.settings, chosen.own);
    this.input.focus();
  }

  /** Use new settings: for this chat only, or for all that have none of their own. */
  changed(chosen, own) {
    const kept = [own || settings.keepForAll(chosen), !this.id || settings.keepFor(this.id, own ? chosen : null)];
    if (kept.includes(false)) toast(`The settings last until another chat is opened: ${settings.NO_ROOM}`, 'error');
    this.settings = chosen;
    this.own = own;
    this.drawModel();
  }

  showSidebar(open = this.frame.classList.contains('no-sidebar')) {
    this.frame.classList.toggle('no-sidebar', !open);
    this.sidebar.element.inert = !open;
    this.toggle.setAttribute('aria-expanded', String(open));
    if (open && this.narrow.matches) this.sidebar.element.querySelector('button').focus();
  }

  /** All branches as an indented list. */
  async showBranches() {
    const shown = new Set(this.tree.path(this.leaf).map((turn) => turn.id));
    const level = (parent) => {
      const rows = [];
      let at = parent;
      for (;;) {
        const children = this.tree.children.get(at) ?? [];
        if (children.length === 0) break;
        if (children.length > 1) {
          rows.push(...children.map((id) => el('li', {}, el('ul', {}, row(id), level(id)))));
          break;
        }
        rows.push(row(children[0]));
        [at] = children;
      }
      return rows;
    };
    const row = (id) => {
      const turn = this.tree.get(id);
      const answer = turn.output?.find((item) => item.type === 'message')?.content?.[0]?.text ?? turn.status;
      return el('li', {}, el('button', { type: 'button', class: shown.has(id) ? 'branch shown' : 'branch', onclick: () => this.picking(turn) },
        el('span', { class: 'title' }, asked(turn).slice(0, 120)), el('span', { class: 'match' }, answer.slice(0, 120))));
    };
    await dialog('Branches', (finish) => {
      this.picking = (turn) => {
        finish(null);
        this.show(turn);
        this.views.get(turn.id)?.element.scrollIntoView({ block: 'start' });
      };
      return el('ul', { class: 'branches' }, level(null));
    });
  }

  async showShortcuts() {
    await dialog('Keyboard shortcuts', () =>
      el('dl', { class: 'shortcuts' }, SHORTCUTS.map(([keys, what]) => el('div', {}, el('dt', {}, keys), el('dd', {}, what)))));
  }

  key(event) {
    if (document.querySelector('dialog[open]')) return;
    const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName ?? '');
    const control = event.ctrlKey || event.metaKey;
    const last = [...this.views.values()].at(-1)?.turn;
    const done = () => event.preventDefault();
    if (control && event.key.toLowerCase() === 'k') {
      done();
      this.showSidebar(true);
      this.sidebar.search.focus();
      this.sidebar.search.select();
    } else if (event.altKey && !control && event.code === 'KeyN') {
      done();
      this.open(null);
    } else if (event.altKey && !control && event.code === 'KeyC') {
      done();
      this.comparison.edit();
    } else if (event.altKey && !control && event.code === 'KeyB') {
      done();
      this.showSidebar();
    } else if (event.altKey && !control && event.code === 'KeyR') {
      done();
      if (last && !this.live) this.retry(last);
    } else if (event.altKey && (event.key === 'ArrowUp' || event.key === 'ArrowDown')) {
      done();
      this.sidebar.step(event.key === 'ArrowDown' ? 1 : -1);
    } else if (event.key === 'Escape') {
      if (this.live) this.stop();
      else if (this.narrow.matches) this.showSidebar(false);
    } else if (!typing && !control && !event.altKey && event.key === '/') {
      done();
      this.input.focus();
    } else if (!typing && !control && !event.altKey && event.key === '?') {
      done();
      this.showShortcuts();
    }
  }
}

let chat = null;

export async function mount(element, api) {
  chat = new Chat(element, api);
  await chat.begin();
}

export function unmount() {
  chat?.end();
  chat = null;
}
