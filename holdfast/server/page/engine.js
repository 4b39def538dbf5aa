// Engine: the engine at work, live or from recorded traces, of which two can be compared with a common clock.
// Data is in engine_data.js, the lanes of steps in engine_lanes.js, the block map in engine_map.js.

import { el, toast } from './dom.js';
import { REASONS, Recording, TIERS, firstFrom, readTrace, traceOf, valueOf } from './engine_data.js';
import { Lanes, Span } from './engine_lanes.js';
import { BlockMap } from './engine_map.js';
import { bytes, duration, number, plural, sentence, shortId, table, whereabouts } from './engine_words.js';

const EVENTS = '/v1/engine/events';
const FRAME = 25; // milliseconds between two frames while time passes, at least: 30 a second on a screen of 60
const TEXT = 500; // milliseconds between two updates of texts and tables
const RATES = 5; // seconds that rates are over
const BEHIND = 0.25; // seconds that the live view is behind the engine, so that steps come in evenly
const BUFFERED = 900; // activities kept while the live view is paused
const LISTED = 24; // conversations, steps and requests in tables
const SPEEDS = [0.25, 1, 4, 16];

let view = null;

export async function mount(element, api) {
  view = new EngineView(element, api);
  view.watch();
}

export function unmount() {
  view?.close();
  view = null;
}

/** What is drawn of one recording. */
class Panel {
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
    this.words = el('p', { class: 'e-words', 'aria-live': 'polite' }, 'Choose a step: click on it, or use the arrow keys.');
    this.details = el('tbody');
    this.detailTable = el('table', { class: 'e-table e-details', hidden: true }, el('caption', { class: 'sr' }, 'The chosen step'), this.details);
    this.waiting = el('tbody');
    this.running = el('tbody');
    this.queueTitle = el('h3', {}, 'Queue');
    this.mapTitle = el('h3', {}, 'Blocks');
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
      this.figureList,
      this.frame,
      el('div', { class: 'e-step' }, this.words, this.detailTable, this.steps),
      el(
        'div',
        { class: 'e-columns' },
        el('div', { class: 'e-blocks' }, this.mapTitle, this.legend, el('div', { class: 'e-frame' }, blocks, this.blockTip), this.rows),
        el(
          'div',
          { class: 'e-queues' },
          this.queueTitle,
          grid('Waiting requests', ['request', 'waits for', 'tokens', 'since'], this.waiting),
          el('h3', {}, 'Running'),
          grid('Running requests', ['request', 'does', 'tokens'], this.running),
        ),
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
    this.words.textContent = step ? sentence(step, this.recording.about) : 'No step is chosen.';
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
      this.mapTitle.textContent = `Blocks of ${plural(recording.rows.size, 'conversation')}`;
    }
    if (this.legend.children.length !== recording.letters.size) this.legend.replaceChildren(...legend(recording.letters));
    if (look) this.queues(look, to);
    if (this.steps.open) this.listSteps(to);
    if (this.rows.open) this.listRows(to);
  }

  figure(name, text) {
    let value = this.figures.get(name);
    if (!value) {
      value = el('dd');
      this.figures.set(name, value);
      this.figureList.append(el('div', {}, el('dt', {}, name), value));
    }
    if (value.textContent !== text) value.textContent = text;
  }

  queues({ queues }, now) {
    this.queueTitle.textContent = queues.waiting ? `Queue: ${plural(queues.waiting, 'request waits', 'requests wait')}` : 'Queue: nobody waits';
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

class EngineView {
  constructor(element, api) {
    this.element = element;
    this.api = api;
    this.panels = [];
    this.live = null;
    this.span = new Span(60);
    this.clock = 0; // seconds since the start, of files
    this.speed = 1;
    this.playing = false;
    this.paused = null; // the time at which the live view stands still
    this.buffered = [];
    this.lag = null;
    this.dirty = true; // draw with the next chance, and not only when a frame is due
    this.fading = false; // marks of changes are still to be seen
    this.frames = 0;
    this.status = el('p', { class: 'e-status', role: 'status' }, 'Connecting…');
    this.pauseButton = el('button', { type: 'button', class: 'button', onclick: () => this.pause() }, 'Pause');
    this.liveButton = el('button', { type: 'button', class: 'button', hidden: true, onclick: () => this.watch() }, 'Back to live');
    this.exportButton = el('button', { type: 'button', class: 'button', onclick: () => this.export() }, 'Export');
    this.exportButton.title = 'Save as a trace for ui.perfetto.dev, which this page can open again';
    this.picker = el('input', { type: 'file', multiple: true, hidden: true, accept: '.json,.trace,application/json', onchange: () => this.open([...this.picker.files]) });
    this.scrub = el('input', { type: 'range', min: '0', max: '1', step: 'any', value: '0', 'aria-label': 'Time', oninput: () => this.seek(Number(this.scrub.value)) });
    this.time = el('output', {}, '0 s');
    this.speedChoice = el('select', { 'aria-label': 'Speed', onchange: () => (this.speed = Number(this.speedChoice.value)) }, SPEEDS.map((each) => el('option', { value: String(each), selected: each === 1 }, `${each}×`)));
    this.player = el('div', { class: 'e-player', hidden: true }, this.scrub, this.time, this.speedChoice);
    this.replica = '';
    this.replicaChoice = el('select', { 'aria-label': 'Replica', class: 'e-choice', hidden: true, onchange: () => this.follow(this.replicaChoice.value) });
    this.gate = el('div', { class: 'e-gate', hidden: true });
    this.place = el('div', { class: 'e-panels' });
    this.bar = el(
      'div',
      { class: 'e-bar' },
      this.status,
      el(
        'div',
        { class: 'e-tools' },
        this.replicaChoice,
        this.pauseButton,
        el('button', { type: 'button', class: 'button', 'aria-label': 'Show less time', title: 'Show less time (+)', onclick: () => this.zoom(0.6, 1) }, '+'),
        el('button', { type: 'button', class: 'button', 'aria-label': 'Show more time', title: 'Show more time (−)', onclick: () => this.zoom(1 / 0.6, 1) }, '−'),
        el('button', { type: 'button', class: 'button', title: 'The latest minute', onclick: () => this.latest() }, 'Latest'),
        el('button', { type: 'button', class: 'button', title: 'Trace files of --trace; two are compared side by side', onclick: () => this.picker.click() }, 'Open trace…'),
        this.exportButton,
        this.liveButton,
        this.picker,
      ),
    );
    this.root = el('div', { class: 'engine' }, this.bar, this.player, this.gate, this.place);
    element.append(this.root);
    this.readColors = () => {
      this.colors = colorsOf(this.root);
      this.dirty = true;
    };
    this.readColors();
    document.addEventListener('themechange', this.readColors);
    this.resized = new ResizeObserver(() => (this.dirty = true));
    this.resized.observe(this.root);
    this.root.addEventListener('dragover', (event) => {
      if (!event.dataTransfer?.types.includes('Files')) return;
      event.preventDefault();
      this.root.classList.add('e-drop');
    });
    this.root.addEventListener('dragleave', () => this.root.classList.remove('e-drop'));
    this.root.addEventListener('drop', (event) => {
      event.preventDefault();
      this.root.classList.remove('e-drop');
      this.open([...event.dataTransfer.files]);
    });
    this.drawnAt = 0;
    this.tick = (moment) => {
      this.animation = requestAnimationFrame(this.tick);
      this.step(moment);
    };
    this.animation = requestAnimationFrame(this.tick);
  }

  close() {
    cancelAnimationFrame(this.animation);
    this.stream?.abort();
    this.resized.disconnect();
    document.removeEventListener('themechange', this.readColors);
  }

  /** Follow the engine, until a file is opened. */
  async watch() {
    this.stream?.abort();
    const stream = (this.stream = new AbortController());
    this.live = new Recording('Live', true);
    this.show([this.live]);
    this.lag = null;
    this.buffered = [];
    this.paused = null;
    this.span = new Span(60);
    this.gate.hidden = true;
    for (let wait = 500; !stream.signal.aborted; wait = Math.min(wait * 2, 8000)) {
      try {
        for await (const { event, data } of this.api.events(this.replica ? `${EVENTS}?replica=${encodeURIComponent(this.replica)}` : EVENTS, { signal: stream.signal })) {
          if (stream.signal.aborted) return;
          wait = 500;
          if (event === 'engine') this.about(data);
          else if (event === 'activity') this.take(data);
          else if (event === 'error') throw new Error(data.message);
        }
        this.say('The stream ended. Connecting again…', 'off');
      } catch (error) {
        if (stream.signal.aborted) return;
        if (error.status === 404 && this.replica) this.replica = ''; // it has gone: follow another one
        else if ([401, 403, 404].includes(error.status)) return this.refused(error);
        this.say(`${error.message || 'The connection was lost'}. Connecting again…`, 'off');
      }
      await new Promise((resolve) => setTimeout(resolve, wait));
    }
  }

  /** The stream has begun: note what engine it tells of, and which others there are. */
  about(engine) {
    this.live.about = engine;
    const names = engine.replicas ?? [];
    this.replicaChoice.replaceChildren(...names.map((name) => el('option', { value: name, selected: name === engine.replica }, name)));
    this.replicaChoice.hidden = names.length < 2;
  }

  /** Follow another replica. */
  follow(replica) {
    this.replica = replica;
    this.watch();
  }

  /** The server does not show its engine: say why, and ask for another key where one may help. */
  refused(error) {
    this.show([]);
    this.say('No live view', 'off');
    const enter = async () => {
      if (await this.api.needKey(this.api.key)) this.watch();
    };
    const ask = error.status !== 404 && /operator/.test(error.message) && !/no operator's key|on this machine/.test(error.message);
    this.gate.replaceChildren(
      el('p', {}, `The engine is not shown: ${error.status === 404 ? 'this server has no language model' : error.message}.`),
      ask ? el('button', { type: 'button', class: 'button primary', onclick: enter }, 'Enter an operator’s key') : null,
      el('p', { class: 'muted' }, 'Recorded traces can be opened without one.'),
    );
    this.gate.hidden = false;
  }

  take(activity) {
    const now = performance.now() / 1000;
    const lag = now - activity.at;
    this.lag = this.lag === null || activity.begins ? lag : Math.min(lag, this.lag + 0.002);
    if (this.paused !== null) {
      this.buffered.push(activity);
      if (this.buffered.length > BUFFERED) this.live.take(this.buffered.shift());
    } else {
      this.live.take(activity); // the next frame shows it
      this.say('Live', 'on');
    }
  }

  say(text, kind = '') {
    if (this.status.textContent !== text) this.status.textContent = text;
    this.status.className = `e-status ${kind}`;
  }

  get present() {
    return this.lag === null ? 0 : performance.now() / 1000 - this.lag - BEHIND;
  }

  get comparing() {
    return this.panels.some((panel) => !panel.recording.live);
  }

  /** The part of time that is shown of a recording, on its own clock. */
  window(recording) {
    const { seconds, end } = this.span;
    const to = recording.live ? (this.paused ?? this.present) + end : recording.start + this.clock;
    return { from: to - seconds, to };
  }

  /** Stop or go on; `stop` only stops. */
  pause(stop = false) {
    if (!this.panels.length) return;
    if (this.comparing) {
      this.playing = stop ? false : !this.playing;
      if (this.playing && this.clock >= this.longest - 1e-6) this.clock = 0;
    } else if (this.paused === null) this.paused = this.present;
    else if (!stop) {
      this.paused = null;
      this.span.end = 0;
      for (const each of this.buffered) this.live.take(each);
      this.buffered = [];
    }
    this.label();
  }

  label() {
    const still = this.comparing ? !this.playing : this.paused !== null;
    this.pauseButton.textContent = this.comparing ? (still ? 'Play' : 'Pause') : still ? 'Go on' : 'Pause';
    this.pauseButton.setAttribute('aria-pressed', String(!this.comparing && still));
    if (!this.comparing && still) this.say('Paused', 'off');
    this.dirty = true;
  }

  zoom(factor, around) {
    const before = this.span.seconds;
    this.span.zoom(factor, this.paused === null && !this.comparing ? 1 : around);
    if (this.comparing) {
      this.clock += (this.span.seconds - before) * (1 - around);
      this.span.end = 0;
    }
    this.dirty = true;
  }

  pan(share) {
    if (this.comparing) this.seek(this.clock + share * this.span.seconds);
    else {
      this.pause(true);
      const least = this.live.start - this.paused + this.span.seconds / 2;
      this.span.end = Math.min(0, Math.max(Math.min(least, 0), this.span.end + share * this.span.seconds));
    }
    this.dirty = true;
  }

  latest() {
    if (this.comparing) this.seek(this.longest);
    else if (this.paused !== null) this.pause();
    this.span = new Span(60);
    this.dirty = true;
  }

  /** Bring a step into view. */
  reveal(recording, step) {
    const { from, to } = this.window(recording);
    const stop = step.at + step.seconds;
    const by = step.at < from ? step.at - from - this.span.seconds * 0.2 : stop > to ? stop - to + this.span.seconds * 0.2 : 0;
    if (this.comparing) this.seek(this.clock + by);
    else this.span.end = Math.min(0, this.span.end + by);
    this.dirty = true;
  }

  get longest() {
    return Math.max(...this.panels.map(({ recording }) => recording.end - recording.start));
  }

  seek(clock) {
    this.clock = Math.min(this.longest, Math.max(0, clock));
    for (const panel of this.panels) panel.textAt = -Infinity;
    this.dirty = true;
  }

  /** Open one or two trace files. One more beside a single open file is compared with it. */
  async open(files) {
    this.picker.value = '';
    const opened = [];
    for (const file of files.slice(0, 2)) {
      try {
        this.say(`Reading ${file.name}…`);
        opened.push(await readTrace(file, (share) => this.say(`Reading ${file.name}: ${Math.round(share * 100)}%`)));
      } catch (error) {
        toast(error.message, 'error');
      }
    }
    if (files.length > 2) toast('Two traces at most are compared: the first two were opened.');
    if (!opened.length) return this.label();
    this.stream?.abort();
    this.gate.hidden = true;
    const before = this.comparing ? this.panels.map(({ recording }) => recording) : [];
    this.show(opened.length === 1 && before.length === 1 ? [...before, ...opened] : opened);
    this.span = new Span(Math.min(60, this.longest || 1));
    this.playing = false;
    this.seek(Math.min(60, this.longest));
    this.say(this.panels.length > 1 ? 'Two traces, one clock' : 'A recorded trace');
    this.label();
  }

  show(recordings) {
    this.panels = recordings.map((recording) => new Panel(this, recording));
    this.place.replaceChildren(...this.panels.map((panel) => panel.element));
    this.place.classList.toggle('two', this.panels.length > 1);
    const files = this.comparing;
    this.player.hidden = this.liveButton.hidden = !files;
    if (files) {
      this.scrub.max = String(this.longest);
      this.replicaChoice.hidden = true;
    }
    this.label();
  }

  /** Save what is shown as a trace in Chrome's format. */
  export() {
    const [panel] = this.panels;
    if (!panel?.recording.steps.length) return toast('There are no steps to export yet.');
    const url = URL.createObjectURL(new Blob([...traceOf(panel.recording)], { type: 'application/json' }));
    const link = el('a', { href: url, download: `holdfast-trace-${new Date().toISOString().slice(0, 19).replaceAll(':', '')}.json` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(url), 60000);
  }

  /** One frame, if anything is to be drawn. */
  step(moment) {
    const passes = this.fading || (this.comparing ? this.playing : this.paused === null && this.lag !== null);
    if (!this.dirty && !(passes && moment - this.drawnAt >= FRAME)) return;
    if (this.comparing && this.playing) {
      this.clock += Math.min(0.25, (moment - this.drawnAt) / 1000) * this.speed;
      if (this.clock >= this.longest) {
        this.clock = this.longest;
        this.playing = false;
        this.label();
      }
    }
    if (this.comparing) {
      this.scrub.value = String(this.clock);
      this.time.textContent = `${this.clock.toFixed(1)} of ${this.longest.toFixed(1)} s`;
    }
    this.drawnAt = moment;
    this.dirty = this.fading = false;
    this.frames++;
    for (const panel of this.panels) if (panel.draw(this.colors, moment)) this.fading = true;
    this.root.dataset.frames = String(this.frames);
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

/** The colours of the theme, by what they are for. */
function colorsOf(element) {
  const style = getComputedStyle(element);
  const value = (name) => style.getPropertyValue(`--${name}`).trim();
  const colors = { requests: [] };
  for (const name of ['bg', 'panel', 'line', 'text', 'muted']) colors[name] = value(name);
  for (const name of ['step', 'over', 'expected', 'target', 'decode', 'waiting', 'training']) colors[name] = value(`e-${name}`);
  for (let at = 0; at < 6; at++) colors.requests.push(value(`e-request-${at}`));
  for (const letter of 'uidbohfkr') colors[letter] = value(`e-${letter}`);
  colors['-'] = value('e-dropped');
  colors['?'] = value('e-unknown');
  return colors;
}
