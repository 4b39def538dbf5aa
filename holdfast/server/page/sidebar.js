// The list of stored conversations: in pages as it is scrolled, searched, renamed, deleted, exported and imported.

import { confirmed, dialog, download, el, icon, iconButton, toast } from './dom.js';
import * as settings from './settings.js';

const PAGE = 100;
const TAKEN = ['id', 'parent', 'history', 'input', 'output', 'status', 'created_at', 'model', 'instructions', 'metadata'];
const FORMAT = 'holdfast.conversation';

export function titleOf(conversation) {
  return conversation.metadata?.title?.trim() || conversation.preview?.trim() || 'New conversation';
}

export class Sidebar {
  /** `chat` opens conversations: open(id), created(), closed(id), renamed(conversation). */
  constructor(api, chat) {
    this.api = api;
    this.chat = chat;
    this.conversations = new Map();
    this.selected = null;
    this.run = 0; // only the latest listing may add rows
    this.cursor = null;
    this.more = false;
    this.loading = false;
    this.search = el('input', {
      type: 'search', class: 'search', placeholder: 'Search', 'aria-label': 'Search conversations', maxlength: 200,
      oninput: () => this.searchSoon(), onkeydown: (event) => this.fromSearch(event),
    });
    this.list = el('ul', { class: 'conversations', onkeydown: (event) => this.arrows(event) });
    this.note = el('p', { class: 'list-note muted', role: 'status' });
    this.scroller = el('div', { class: 'list-scroll', onscroll: () => this.nearEnd() }, this.list, this.note);
    this.file = el('input', { type: 'file', accept: '.json,application/json', hidden: true, onchange: () => this.importFile() });
    this.element = el(
      'nav',
      { class: 'sidebar', 'aria-label': 'Conversations' },
      el('div', { class: 'sidebar-head' },
        el('button', { type: 'button', class: 'button new', onclick: () => this.chat.open(null) }, icon('plus'), 'New chat'),
        iconButton('import', 'Import a conversation', () => this.file.click()),
        this.file,
      ),
      el('div', { class: 'search-box' }, icon('search'), this.search),
      this.scroller,
    );
  }

  searchSoon() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.reload(), 180);
  }

  fromSearch(event) {
    if (event.key === 'ArrowDown') {
      event.preventDefault();
      this.list.querySelector('.row')?.focus();
    } else if (event.key === 'Escape' && this.search.value) {
      event.stopPropagation();
      this.search.value = '';
      this.reload();
    }
  }

  arrows(event) {
    if (event.key !== 'ArrowDown' && event.key !== 'ArrowUp') return;
    const rows = [...this.list.querySelectorAll('.row')];
    const at = rows.indexOf(document.activeElement);
    if (at < 0) return;
    event.preventDefault();
    (rows[at + (event.key === 'ArrowDown' ? 1 : -1)] ?? this.search).focus();
  }

  /** List from the beginning. */
  async reload() {
    this.run += 1;
    this.cursor = null;
    this.more = true;
    this.loading = false;
    this.fresh = true;
    await this.nextPage();
  }

  nearEnd() {
    const { scrollTop, clientHeight, scrollHeight } = this.scroller;
    if (this.more && !this.loading && scrollTop + clientHeight > scrollHeight - 1200) this.nextPage();
  }

  async nextPage() {
    const run = this.run;
    const wanted = this.search.value.trim();
    this.loading = true;
    const query = new URLSearchParams({ limit: PAGE });
    if (wanted) query.set('search', wanted);
    if (this.cursor) query.set('after', this.cursor);
    try {
      const page = await this.api.get(`/v1/conversations?${query}`);
      if (run !== this.run) return;
      if (this.fresh) {
        this.fresh = false;
        this.conversations.clear();
        this.list.replaceChildren();
        this.scroller.scrollTop = 0;
      }
      this.more = page.has_more && page.last_id !== null;
      this.cursor = page.last_id;
      this.add(page.data);
      this.note.textContent = this.conversations.size === 0 && !this.more ? (wanted ? 'Nothing found.' : 'No conversations yet.') : '';
    } catch (error) {
      if (run !== this.run) return;
      this.more = false;
      this.note.textContent = error.message;
    } finally {
      if (run === this.run) this.loading = false;
    }
    // A page of a search may be short, and the window may be tall.
    if (run === this.run && this.more && this.scroller.scrollHeight <= this.scroller.clientHeight + 600) await this.nextPage();
  }

  add(found) {
    const rows = document.createDocumentFragment();
    for (const conversation of found) {
      if (this.conversations.has(conversation.id)) continue;
      const group = age(conversation.active_at);
      const last = rows.lastElementChild ?? this.list.lastElementChild;
      if (!this.search.value && group !== (last?.dataset.group ?? '')) {
        rows.append(el('li', { class: 'group', 'data-group': group }, group));
      }
      this.conversations.set(conversation.id, conversation);
      rows.append(this.row(conversation, group));
    }
    this.list.append(rows);
  }

  row(conversation, group) {
    const title = titleOf(conversation);
    const open = el(
      'button',
      { type: 'button', class: 'row', title, 'aria-current': conversation.id === this.selected ? 'true' : null, onclick: () => this.chat.open(conversation.id) },
      el('span', { class: 'title' }, title),
      conversation.match && conversation.match !== title ? el('span', { class: 'match' }, conversation.match) : null,
    );
    const more = iconButton('more', `Options of ${title}`, () => this.options(conversation), { class: 'ghost row-more', 'aria-haspopup': 'dialog' });
    return el('li', { class: 'item', 'data-id': conversation.id, 'data-group': group }, open, more);
  }

  /** Mark a conversation as the one that is open. */
  select(id) {
    this.selected = id;
    for (const row of this.list.querySelectorAll('[aria-current]')) row.removeAttribute('aria-current');
    const item = id && this.list.querySelector(`[data-id="${CSS.escape(id)}"]`);
    item?.querySelector('.row').setAttribute('aria-current', 'true');
  }

  /** A conversation has a new turn: list it first. */
  touch(conversation) {
    const known = this.conversations.get(conversation.id) ?? conversation;
    known.active_at = Date.now() / 1000;
    if (this.search.value) return;
    this.conversations.delete(known.id);
    this.conversations = new Map([[known.id, known], ...this.conversations]);
    this.list.querySelector(`[data-id="${CSS.escape(known.id)}"]`)?.remove();
    const group = age(known.active_at);
    if (this.list.firstChild?.dataset.group !== group) this.list.prepend(el('li', { class: 'group', 'data-group': group }, group));
    this.list.firstChild.after(this.row(known, group));
    for (const heading of this.list.querySelectorAll('.group')) {
      if (heading.nextSibling?.dataset.group !== heading.dataset.group) heading.remove();
    }
    this.note.textContent = '';
    this.select(this.selected);
  }

  /** Open the conversation above or below the one that is open. */
  step(by) {
    const ids = [...this.conversations.keys()];
    const at = ids.indexOf(this.selected);
    const id = ids[at < 0 ? 0 : at + by];
    if (id) {
      this.chat.open(id);
      this.list.querySelector(`[data-id="${CSS.escape(id)}"]`)?.scrollIntoView({ block: 'nearest' });
    }
  }

  async options(conversation) {
    const what = await dialog(titleOf(conversation), (finish) =>
      el(
        'div',
        { class: 'menu' },
        el('button', { type: 'button', class: 'ghost', onclick: () => finish('rename') }, icon('edit'), 'Rename'),
        el('button', { type: 'button', class: 'ghost', onclick: () => finish('export') }, icon('export'), 'Export as a file'),
        el('button', { type: 'button', class: 'ghost danger-text', onclick: () => finish('remove') }, icon('trash'), 'Delete'),
      ),
    );
    if (what === null) return;
    try {
      await this[what](conversation);
    } catch (error) {
      toast(error.message, 'error');
    }
  }

  async rename(conversation) {
    const title = await dialog('Rename', (finish) => {
      const input = el('input', { id: 'new-title', value: titleOf(conversation), maxlength: 200, required: true, autofocus: true });
      setTimeout(() => input.select());
      const submit = (event) => {
        event.preventDefault();
        finish(input.value.trim());
      };
      return el('form', { class: 'form', onsubmit: submit }, el('label', { for: 'new-title' }, 'Title'), input,
        el('div', { class: 'dialog-actions' }, el('button', { type: 'submit', class: 'button primary' }, 'Rename')));
    });
    if (!title) return;
    const metadata = { ...conversation.metadata, title };
    await this.api.post(`/v1/conversations/${conversation.id}`, { metadata });
    conversation.metadata = metadata;
    const row = this.row(conversation, age(conversation.active_at));
    this.list.querySelector(`[data-id="${CSS.escape(conversation.id)}"]`)?.replaceWith(row);
    row.querySelector('.row-more').focus();
    this.chat.renamed(conversation);
  }

  async remove(conversation) {
    const text = `“${titleOf(conversation)}” is deleted from the server with all its branches. This cannot be undone.`;
    if (!(await confirmed('Delete this conversation?', text, 'Delete'))) return;
    await this.chat.closing(conversation.id);
    await this.api.delete(`/v1/conversations/${conversation.id}?responses=true`);
    this.conversations.delete(conversation.id);
    this.list.querySelector(`[data-id="${CSS.escape(conversation.id)}"]`)?.remove();
    this.chat.closed(conversation.id);
  }

  async export(conversation) {
    const tree = await this.api.get(`/v1/conversations/${conversation.id}/turns`);
    const turns = tree.turns.filter((turn) => ['completed', 'incomplete', 'cancelled'].includes(turn.status)).map((turn) => {
      const taken = Object.fromEntries(TAKEN.filter((name) => turn[name] !== undefined && turn[name] !== null).map((name) => [name, turn[name]]));
      return { ...taken, input: turn.input, output: turn.output };
    });
    const kept = new Set(turns.map((turn) => turn.id));
    const parents = new Map(tree.turns.map((turn) => [turn.id, turn.parent]));
    for (const turn of turns) {
      while (turn.parent && !kept.has(turn.parent)) turn.parent = parents.get(turn.parent) ?? null;
      if (!turn.parent) delete turn.parent;
    }
    const own = settings.ownOf(conversation.id);
    const copy = { format: FORMAT, version: 1, metadata: conversation.metadata, head: kept.has(tree.head) ? tree.head : null, turns, ...(own && { settings: own }) };
    const name = titleOf(conversation).replace(/[^\p{L}\p{N} _-]+/gu, '').trim().slice(0, 60) || 'conversation';
    download(`${name}.json`, JSON.stringify(copy, null, 1), 'application/json');
  }

  async importFile() {
    const file = this.file.files[0];
    this.file.value = '';
    if (!file) return;
    try {
      const { format, version, settings: own, ...copy } = JSON.parse(await file.text());
      if (format !== FORMAT || version !== 1) throw new Error('it is not a conversation that was exported here');
      const made = await this.api.post('/v1/conversations/copies', copy);
      if (own) settings.keepFor(made.id, settings.valid(own));
      toast(`Imported “${file.name}”`);
      await this.reload();
      this.chat.open(made.id);
    } catch (error) {
      toast(`“${file.name}” cannot be imported: ${error.message}`, 'error');
    }
  }
}

/** The heading that a conversation stands under, by its last activity. */
function age(seconds) {
  const days = (new Date().setHours(0, 0, 0, 0) - new Date(seconds * 1000).setHours(0, 0, 0, 0)) / 86_400_000;
  if (days < 0.5) return 'Today';
  if (days < 1.5) return 'Yesterday';
  if (days < 7.5) return 'Last 7 days';
  if (days < 30.5) return 'Last 30 days';
  return 'Older';
}
