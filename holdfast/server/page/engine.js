// Engine: the engine at work, live or from recorded traces, of which two can be compared with a common clock.
// What is drawn of a recording is in engine_panel.js, and the data in engine_data.js.

import { download, el, toast } from './dom.js';
import { Recording, readTrace, traceOf } from './engine_data.js';
import { Span } from './engine_lanes.js';
import { Panel } from './engine_panel.js';
import { Explainer } from './engine_terms.js';

const EVENTS = '/v1/engine/events';
const FRAME = 25; // milliseconds between two frames while time passes, at least: 30 a second on a screen of 60
const BEHIND = 0.25; // seconds that the live view is behind the engine, so that steps come in evenly
const BUFFERED = 900; // activities kept while the live view is paused
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
    this.explainer = new Explainer(this.root);
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
        this.live.lost = true;
        this.say('The stream ended. Connecting again…', 'off');
      } catch (error) {
        if (stream.signal.aborted) return;
        if (error.status === 404 && this.replica) this.replica = ''; // it has gone: follow another one
        else if ([401, 403, 404].includes(error.status)) return this.refused(error);
        this.live.lost = true;
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
    const absent = error.status === 404;
    const ask = !absent && /operator/.test(error.message) && !/no operator's key|on this machine/.test(error.message);
    this.gate.replaceChildren(
      el('p', {}, `The engine is not shown: ${absent ? 'this server has no language model' : error.message}.`),
      ...(ask ? [el('button', { type: 'button', class: 'button primary', onclick: enter }, 'Enter an operator’s key')] : []),
      el('p', { class: 'muted' }, absent ? 'Recorded traces can be opened all the same.' : 'Recorded traces can be opened without a key.'),
    );
    this.gate.hidden = false;
  }

  take(activity) {
    const now = performance.now() / 1000;
    const lag = now - activity.at;
    this.live.lost = false;
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
    download(`holdfast-trace-${new Date().toISOString().slice(0, 19).replaceAll(':', '')}.json`, [...traceOf(panel.recording)], 'application/json');
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
