// One recording of the engine on the page: its story, its steps over time, the blocks and the queues, with tables.

import { el } from './dom.js';
import { REASONS, TIERS, firstFrom, valueOf } from './engine_data.js';
import { Lanes } from './engine_lanes.js';
import { BlockMap } from './engine_map.js';
import { stateOf, storyAt } from './engine_story.js';
import { wordList } from './engine_terms.js';
import { bytes, duration, number, plural, sentence, shortId, table, whereabouts } from './engine_words.js';

const TEXT = 500; // milliseconds between two updates of texts and tables
const RATES = 5; // seconds that rates are over
const LISTED = 24; // conversations, steps and requests in tables
const STORED = 'holdfast.engine.sections';

/** What is drawn of one recording. */
export class Panel {
  constructor(owner, recording) {
    this.owner = owner;
    this.recording = recording;
    this.selected = null;
    this.textAt = -Infinity;
    const canvas = el('canvas', { class: 'e-lanes', 'aria-hidden': 'true' });
    const blocks = el('canvas', { class: 'e-map', 'aria-hidden': 'true' });
    this.tip = el('div', { class: 'e-tip', hidden: true });
    this.blockTip = el('div', { class: 'e-tip', hidden: true });
    this.figures = new Map();
    this.figureList = el('dl', { class: 'e-figures', 'aria-label': 'Rates and totals' });
    this.frame = el(
      'div',
      { class: 'e-frame', tabindex: '0', role: 'group', 'aria-label': 'Steps over time. Left and right arrows choose a step, plus and minus zoom, space pauses.', onkeydown: (event) => this.key(event) },
      canvas,
      this.tip,
    );
    this.words = el('p', { class: 'e-words', 'aria-live': 'polite' });
    this.headline = el('p', { class: 'e-headline' });
    this.story = new Map(); // by term: {value, text}
    this.storyList = el('dl', { class: 'e-story', 'aria-label': 'The engine in short' });
    this.details = el('tbody');
    this.detailTable = el('table', { class: 'e-table e-details', hidden: true }, el('caption', { class: 'sr' }, 'The chosen step'), this.details);
    this.waiting = el('tbody');
    this.running = el('tbody');
    this.queueTitle = el('h3', {}, 'Queue');
    this.runTitle = el('h3', {}, 'Running');
    this.mapTitle = el('h3', {}, 'State');
    this.waitingGrid = grid('Waiting requests', ['request', 'waits for', 'tokens', 'since'], this.waiting);
    this.runningGrid = grid('Running requests', ['request', 'does', 'tokens'], this.running);
    this.legend = el('ul', { class: 'e-legend' });
    this.stepRows = el('tbody');
    this.steps = el('details', { class: 'e-more' }, el('summary', {}, 'The latest steps as a table'), grid('The latest steps', ['step', 'took', 'decodes', 'prompt tokens', 'blocks in', 'blocks out'], this.stepRows));
    this.rowRows = el('tbody');
    this.rows = el('details', { class: 'e-more' }, el('summary', {}, 'Conversations as a table'), grid('Conversations', ['conversation', 'state', 'idle for', 'value', 'where its blocks lie, from its beginning'], this.rowRows));
    for (const each of [this.steps, this.rows]) each.addEventListener('toggle', () => this.rewrite());
    this.name = el('h2', { class: 'e-name' });
    this.element = el(
      'section',
      { class: 'e-panel', 'aria-label': recording.name },
      this.name,
      this.headline,
      this.storyList,
      this.section('words', el('h3', {}, 'What the words mean'), false, wordList()),
      this.section('figures', el('h3', {}, 'All figures'), false, this.figureList),
      this.section('steps', el('h3', {}, 'Steps over time'), true, this.frame, el('div', { class: 'e-step' }, this.words, this.detailTable, this.steps)),
      el(
        'div',
        { class: 'e-columns' },
        this.section('blocks', this.mapTitle, true,
          el('div', { class: 'e-blocks' }, this.legend, el('div', { class: 'e-frame' }, blocks, this.blockTip), this.rows)),
        this.section('queues', this.queueTitle, true,
          el('div', { class: 'e-queues' }, this.waitingGrid, this.runTitle, this.runningGrid)),
      ),
    );
    this.lanes = new Lanes(canvas, {
      onSelect: (step) => this.select(step),
      onZoom: (factor, around) => owner.zoom(factor, around),
      onPan: (share) => owner.pan(share),
      onHover: (step, x) => this.hover(this.tip, step && sentence(step, recording.about), x, 0, canvas),
    });
    this.map = new BlockMap(blocks, (text, x, y) => this.hover(this.blockTip, text, x, y, blocks));
  }

  /** A part of the panel that can be closed. The browser keeps whether it is. */
  section(name, title, open, ...content) {
    const element = el('details', { class: `e-section e-${name}-section`, open: sections()[name] ?? open }, el('summary', {}, title), content);
    element.addEventListener('toggle', () => {
      if (element.open !== (sections()[name] ?? open)) keepSection(name, element.open);
      this.rewrite();
    });
    return element;
  }

  /** Bring the texts up to date with the next frame. */
  rewrite() {
    this.textAt = -Infinity;
    this.owner.dirty = true;
  }

  hover(tip, text, x, y, canvas) {
    tip.hidden = !text;
    if (text) {
      tip.textContent = text;
      const wide = Math.min(340, canvas.clientWidth);
      tip.style.maxWidth = `${wide}px`;
      tip.style.left = `${Math.max(0, Math.min(x + 14, canvas.clientWidth - wide))}px`;
      tip.style.top = `${y + 18}px`;
    }
    this.owner.dirty = true;
  }

  select(step) {
    this.selected = step;
    this.owner.dirty = true;
    this.detailTable.hidden = !step;
    this.words.textContent = step ? sentence(step, this.recording.about) : '';
    this.details.replaceChildren(...(step ? table(step, this.recording).map(([name, value]) => el('tr', {}, el('th', { scope: 'row' }, name), el('td', {}, value))) : []));
  }

  /** Choose the step so many places further on, and bring it into view. */
  choose(by) {
    const { steps } = this.recording;
    if (!steps.length) return;
    this.owner.pause(true);
    const { to } = this.owner.window(this.recording);
    const at = this.selected ? firstFrom(steps, this.selected.at) + by : firstFrom(steps, to) - 1;
    const step = steps[Math.min(steps.length - 1, Math.max(0, at))];
    this.select(step);
    this.owner.reveal(this.recording, step);
  }

  key(event) {
    const { owner } = this;
    const done = {
      ArrowLeft: () => (event.shiftKey ? owner.pan(-0.2) : this.choose(-1)),
      ArrowRight: () => (event.shiftKey ? owner.pan(0.2) : this.choose(1)),
      Home: () => this.choose(-Infinity),
      End: () => owner.latest(),
      '+': () => owner.zoom(0.7, 1),
      '=': () => owner.zoom(0.7, 1),
      '-': () => owner.zoom(1 / 0.7, 1),
      ' ': () => owner.pause(),
      Escape: () => this.select(null),
    }[event.key];
    if (!done || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    done();
  }

  draw(colors, moment) {
    const { from, to } = this.owner.window(this.recording);
    this.recording.seek(to);
    this.lanes.present = to;
    this.lanes.draw(this.recording, from, to, this.selected, colors);
    this.map.draw(this.recording, to, colors);
    if (moment - this.textAt > TEXT) {
      this.textAt = moment;
      this.write(from, to);
    }
    return this.map.flashing;
  }

  /** Bring numbers and tables up to date. */
  write(from, to) {
    const { recording } = this;
    const { about } = recording;
    const look = recording.lookAt(to);
    const stats = look?.stats;
    const rates = recording.rates(Math.max(to - RATES, recording.start), to);
    this.tell(storyAt(recording, to));
    if (!this.selected) this.say(this.words, recording.steps.length ? 'Choose a step to see what it computed: click on it, or use the arrow keys.' : 'No step yet: nothing has been computed. Each step will appear here as a bar.');
    this.name.textContent = [recording.live ? '' : recording.name, about.model, about.scheduler, about.target ? `target ${duration(about.target)}` : '', about.device, recording.truncated ? 'cut off' : ''].filter(Boolean).join(' · ');
    this.figure('tokens a second', number(rates.decodes));
    this.figure('prompt tokens a second', number(rates.prefill));
    this.figure('steps a second', number(rates.steps));
    this.figure('computing', `${Math.round(rates.busy * 100)}%`);
    if (rates.training) this.figure('training', `${Math.round(rates.training * 100)}%`);
    if (stats) {
      const free = stats.blocks_total - stats.blocks_used - stats.blocks_cached - (stats.blocks_training ?? 0);
      this.figure('device blocks', `${number(stats.blocks_used)} used, ${number(stats.blocks_cached)} kept, ${number(free)} free`);
      if (stats.host_blocks_total) {
        this.figure('host blocks', `${number(stats.host_blocks_cached)} of ${number(stats.host_blocks_total)}`);
        this.figure('copied a second', `${number(rates.inward)} in, ${number(rates.outward)} out`);
      }
      if (stats.disk_blocks_total) this.figure('disk blocks', `${number(stats.disk_blocks_cached)} of ${number(stats.disk_blocks_total)}`);
      if (stats.disk_bytes_written) this.figure('disk', `${bytes(stats.disk_bytes_written)} written, ${bytes(stats.disk_bytes_read)} read`);
      if (stats.remote_bytes_written || stats.remote_bytes_read) this.figure('remote tier', `${bytes(stats.remote_bytes_written)} written, ${bytes(stats.remote_bytes_read)} read`);
      if (stats.prefix_queries) {
        const share = (hits) => Math.round((100 * (hits ?? 0)) / stats.prefix_queries);
        const lower = (stats.prefix_hits_on_disk ?? 0) + (stats.prefix_hits_on_remote ?? 0);
        const below = [['host', stats.prefix_hits_on_host - lower], ['disk', stats.prefix_hits_on_disk], ['remote', stats.prefix_hits_on_remote]];
        const told = below.filter(([, hits]) => hits > 0).map(([tier, hits]) => `${share(hits)}% ${tier}`).join(', ');
        this.figure('prompt tokens found', `${share(stats.prefix_hits)}%${told && ` (${told})`}`);
      }
      if (stats.contracts_accepted || stats.contracts_refused) {
        const broken = stats.contracts_broken_ttft + stats.contracts_broken_tbt + stats.contracts_broken_complete;
        this.figure('contracts', `${number(stats.contracts_kept)} kept, ${number(broken)} broken, ${number(stats.contracts_refused)} refused`);
      }
    }
    const state = stateOf(recording);
    if (state.conversations || look) this.say(this.mapTitle, state.conversations || !stats?.blocks_cached ? `State of ${plural(state.conversations, 'conversation')}: ${plural(state.blocks, 'block')}` : `State: ${plural(stats.blocks_cached, 'block')}`);
    if (this.legend.children.length !== recording.letters.size) this.legend.replaceChildren(...legend(recording.letters));
    if (look) this.queues(look, to);
    if (this.steps.open) this.listSteps(to);
    if (this.rows.open) this.listRows(to);
  }

  say(element, text) {
    if (element.textContent !== text) element.textContent = text;
  }

  tell({ headline, parts }) {
    this.say(this.headline, headline);
    for (const { term, value, text } of parts) {
      let shown = this.story.get(term);
      if (!shown) {
        shown = { value: el('dd', { class: 'e-value' }), text: el('dd', {}) };
        this.story.set(term, shown);
        this.storyList.append(el('div', {}, el('dt', {}, this.owner.explainer.term(term, term[0].toUpperCase() + term.slice(1))), shown.value, shown.text));
      }
      this.say(shown.value, value);
      this.say(shown.text, text);
    }
  }

  figure(name, text) {
    let value = this.figures.get(name);
    if (!value) {
      value = el('dd');
      this.figures.set(name, value);
      this.figureList.append(el('div', {}, el('dt', {}, this.owner.explainer.term(name)), value));
    }
    this.say(value, text);
  }

  queues({ queues }, now) {
    this.say(this.queueTitle, queues.waiting ? `Queue: ${plural(queues.waiting, 'request waits', 'requests wait')}` : 'Queue: nobody waits');
    this.say(this.runTitle, queues.running ? `Running: ${plural(queues.running, 'request')}` : 'Nothing is running');
    this.waitingGrid.hidden = !queues.waiting;
    this.runningGrid.hidden = !queues.running;
    this.waiting.replaceChildren(
      ...queues.first.slice(0, LISTED).map(([id, reason, tokens, arrival]) =>
        el('tr', {}, el('td', { class: 'e-id' }, shortId(id)), el('td', { title: REASONS[reason] }, `${reason}: ${REASONS[reason] ?? ''}`), el('td', {}, number(tokens)), el('td', {}, duration(Math.max(0, now - arrival)))),
      ),
    );
    this.running.replaceChildren(
      ...queues.rows.slice(0, LISTED).map(([id, planned, tokens, prompt]) => {
        const lacking = tokens - planned > 1;
        const does = lacking ? `prompt: ${Math.round((100 * planned) / tokens)}%` : `answer: ${plural(tokens - prompt, 'token')}`;
        return el('tr', {}, el('td', { class: 'e-id' }, shortId(id)), el('td', {}, does), el('td', {}, number(tokens)));
      }),
    );
  }

  listSteps(to) {
    const { steps } = this.recording;
    const last = firstFrom(steps, to);
    this.stepRows.replaceChildren(
      ...steps.slice(Math.max(0, last - LISTED), last).reverse().map((step) =>
        el(
          'tr',
          {},
          el('td', {}, el('button', { type: 'button', class: 'e-link', onclick: () => this.select(step) }, String(step.step))),
          ...[duration(step.seconds / (step.steps ?? 1)), number(step.decodes), number(step['prefill tokens']), number(step['blocks in'] ?? 0), number(step['blocks out'] ?? 0)].map((text) => el('td', {}, text)),
        ),
      ),
    );
  }

  listRows(now) {
    this.rowRows.replaceChildren(
      ...BlockMap.sorted(this.recording).slice(0, LISTED).map((row) => {
        const idle = row.state === 'idle' && row.last > 0;
        const age = Math.max(now - row.last, 1e-3);
        const value = idle && row.cost ? valueOf(row, row.cost, age).toPrecision(2) : '–';
        return el('tr', {}, ...[row.number, row.state, idle ? duration(age) : '–', value, whereabouts(row)].map((text) => el('td', {}, String(text))));
      }),
    );
  }
}

/** A table that scrolls, by keys too. */
function grid(label, names, body) {
  return el('div', { class: 'e-scroll', tabindex: '0', role: 'region', 'aria-label': label }, el('table', { class: 'e-table' }, el('thead', {}, el('tr', {}, names.map((name) => el('th', { scope: 'col' }, name)))), body));
}

/** What the colours of the block map mean, for these letters. */
function legend(letters) {
  return Object.entries(TIERS).filter(([letter]) => letters.has(letter)).map(([letter, { name, text }]) =>
    el('li', { title: text }, el('span', { class: `e-key e-key-${{ '-': 'dropped', '?': 'unknown' }[letter] ?? letter}`, 'aria-hidden': 'true' }), name));
}

/** Which parts of the panel are open, by name, as far as the user has said. */
function sections() {
  try {
    return JSON.parse(localStorage.getItem(STORED) ?? '{}') ?? {};
  } catch {
    return {};
  }
}

function keepSection(name, open) {
  try {
    localStorage.setItem(STORED, JSON.stringify({ ...sections(), [name]: open }));
  } catch {}
}
