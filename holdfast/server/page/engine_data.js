// What an engine did: records of steps, queues and blocks, from the live stream or from a trace file.

const KEPT_SECONDS = 150; // of a live recording
const KEPT_STEPS = 30000;
const DEVICE = 0;
const COPIES = 2;
const STATE = 3; // process numbers of a trace, as holdfast/engine/trace.py has them
const TRAINING_LANE = 2;

/** Where blocks lie, by the letter that stands for it (TIERS of lm/memory/block_pool.py and lower_tiers.py). */
export const TIERS = {
  u: { name: 'in use', text: 'on the device, in use' },
  i: { name: 'coming in', text: 'being copied to the device' },
  d: { name: 'device', text: 'on the device, idle' },
  b: { name: 'both', text: 'on the device, idle, with a copy on the host' },
  o: { name: 'going out', text: 'being copied to the host' },
  h: { name: 'host', text: 'on the host' },
  f: { name: 'coming back', text: 'being brought back to the host' },
  k: { name: 'disk', text: 'on the disk' },
  r: { name: 'remote', text: 'in the remote tier' },
  '-': { name: 'dropped', text: 'dropped, or not computed yet' },
  '?': { name: 'unknown', text: 'not seen: dropped before, or shared with another conversation' },
};

/** Why a request waits (lm/scheduler/queue_report.py: REASONS). */
export const REASONS = {
  'no row': 'all rows are taken',
  'no blocks': 'too few blocks are free',
  budget: 'the steps so far were full, or its turn comes with the next one',
  'copies under way': 'state is being copied between device and host',
  fetching: 'its state is being brought back from the disk or the remote tier',
  'results in flight': 'it was preempted, and its last tokens are still being computed',
  'adapter loading': 'its adapter is not on the device yet',
  'shared prefix': 'another request computes the beginning of its prompt, and it goes on from there',
  'tenant limit': 'as many sequences of its tenant run as may (max_tenant_sequences)',
  order: 'others are ahead of it',
};

/** The first index whose element's `at` is not below `at`. */
export function firstFrom(list, at) {
  let low = 0;
  let high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle].at < at) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** One row of the block map: a conversation, with runs of [letter, blocks]. */
function rowOf([number, request, state, last, cost, runs, worth = -1]) {
  let blocks = 0;
  for (const [, count] of runs) blocks += count;
  return { number, request, state, last, cost, runs, worth, blocks };
}

/** The value of idle state that costs so much to compute again, by the eviction in force: lower goes first. */
export function valueOf(row, cost, age) {
  return cost * (row.worth < 0 ? 1 / age : row.worth);
}

export class Recording {
  constructor(name, live = false) {
    this.name = name;
    this.live = live;
    this.about = {};
    this.costs = [];
    this.steps = [];
    this.copies = [];
    this.slices = [];
    this.looks = []; // {at, queues, stats}
    this.changes = []; // {at, row}, of a file
    this.rows = new Map();
    this.version = 0; // of the rows
    this.letters = new Set('uidboh-?'); // of TIERS: those to explain
    this.applied = 0; // changes that the rows have
    this.truncated = false;
    this.lost = false; // a live engine that cannot be reached: what it did last is all that is known
  }

  get start() {
    return this.steps.length ? this.steps[0].at : (this.looks[0]?.at ?? 0);
  }

  get end() {
    const last = this.steps[this.steps.length - 1];
    return Math.max(last ? last.at + last.seconds : 0, this.looks[this.looks.length - 1]?.at ?? 0);
  }

  /** Add what the live stream tells. */
  take(activity) {
    if (activity.begins) {
      this.steps = [];
      this.copies = [];
      this.slices = [];
      this.looks = [];
      this.rows = new Map();
      this.version++;
      this.costs = activity.costs ?? [];
    }
    for (const step of activity.steps) this.addStep(step);
    for (const row of activity.blocks) this.setRow(rowOf(row));
    if (activity.queues) this.looks.push({ at: activity.at, queues: activity.queues, stats: activity.stats });
    this.prune(activity.at - KEPT_SECONDS);
  }

  addStep(step) {
    step.chunks ??= [];
    this.steps.push(step);
    for (const copy of step.copies ?? []) this.copies.push(copy);
    if (step.training) this.slices.push(step.training);
  }

  setRow(row) {
    if (row.state === 'gone') this.rows.delete(row.number);
    else {
      row.before = this.rows.get(row.number)?.runs;
      row.changed = performance.now();
      this.rows.set(row.number, row);
      for (const [letter] of row.runs) this.letters.add(letter);
    }
    this.version++;
  }

  prune(before) {
    for (const list of [this.steps, this.copies, this.slices, this.looks]) {
      if (list.length && (list[0].at < before - 15 || list.length > KEPT_STEPS)) {
        list.splice(0, Math.max(firstFrom(list, before), list.length - KEPT_STEPS));
      }
    }
  }

  /** Let the rows be as they were at a time; for a file. */
  seek(at) {
    if (this.live) return;
    if (this.applied > 0 && this.changes[this.applied - 1].at > at) {
      this.rows = new Map();
      this.applied = 0;
      this.version++;
    }
    while (this.applied < this.changes.length && this.changes[this.applied].at <= at) {
      this.setRow({ ...this.changes[this.applied++].row });
    }
  }

  /** The last look at queues and numbers at or before a time. */
  lookAt(at) {
    return this.looks[firstFrom(this.looks, at + 1e-9) - 1] ?? this.looks[0] ?? null;
  }

  /** Rates over [from, to], each in units a second, and the share of it in which the device computed. */
  rates(from, to) {
    const seconds = Math.max(to - from, 1e-3);
    let decodes = 0, prefill = 0, steps = 0, busy = 0, inward = 0, outward = 0, training = 0;
    for (let at = firstFrom(this.steps, from); at < this.steps.length && this.steps[at].at < to; at++) {
      const step = this.steps[at];
      decodes += step.decodes;
      prefill += step['prefill tokens'];
      steps += step.steps ?? 1;
      busy += step.seconds;
      inward += step['blocks in'] ?? 0;
      outward += step['blocks out'] ?? 0;
    }
    for (let at = firstFrom(this.slices, from); at < this.slices.length && this.slices[at].at < to; at++) {
      training += this.slices[at].seconds;
    }
    return {
      decodes: decodes / seconds, prefill: prefill / seconds, steps: steps / seconds,
      busy: Math.min(1, (busy + training) / seconds), inward: inward / seconds, outward: outward / seconds,
      training: training / seconds,
    };
  }

  /** The cost of computing the chunk at a block of a conversation again. */
  costAt(index) {
    let cost = 0;
    for (const [place, value] of this.costs) {
      if (place > index) break;
      cost = value;
    }
    return cost;
  }
}

/** Read a trace file: of an engine or a simulator run, by `--trace`, or exported by this page. Throws Error with the reason. */
export async function readTrace(file, onProgress = () => {}) {
  const recording = new Recording(file.name);
  const reader = file.stream().pipeThrough(new TextDecoderStream()).getReader();
  let rest = '', read = 0, events = 0, broken = 0;
  const take = (line) => {
    const text = line.trim().replace(/,$/, '');
    if (text.length < 2 || text.includes('"pid": 1,')) return; // a segment of one row; the step has its numbers
    let event;
    try {
      event = JSON.parse(text);
    } catch {
      broken++;
      return;
    }
    const found = Array.isArray(event) ? event : (event.traceEvents ?? [event]);
    for (const each of found) {
      events++;
      takeEvent(recording, each);
    }
  };
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    rest += value;
    read += value.length;
    const lines = rest.split('\n');
    rest = lines.pop();
    for (const line of lines) take(line);
    onProgress(Math.min(1, read / Math.max(1, file.size)));
  }
  take(rest);
  for (const list of [recording.steps, recording.copies, recording.slices, recording.looks, recording.changes]) {
    list.sort((one, other) => one.at - other.at);
  }
  if (!recording.steps.length) {
    throw new Error(events ? `${file.name} has no steps of Holdfast in it` : `${file.name} is not a trace file`);
  }
  recording.truncated = broken > 0;
  return recording;
}

function takeEvent(recording, event) {
  const at = (event.ts ?? 0) / 1e6;
  const times = { at, seconds: (event.dur ?? 0) / 1e6 };
  const numbers = event.args ?? {};
  if (event.ph === 'X' && event.pid === DEVICE && event.tid === 0) {
    if (Number.isInteger(numbers.tokens) && Number.isInteger(numbers.decodes)) recording.addStep({ ...numbers, ...times });
  } else if (event.ph === 'X' && event.pid === DEVICE && event.tid === TRAINING_LANE) {
    recording.slices.push({ ...numbers, ...times, action: event.name === 'training' ? 'run' : event.name });
  } else if (event.ph === 'X' && event.pid === COPIES) {
    recording.copies.push({ ...numbers, ...times, inward: event.tid === 1 });
  } else if (event.pid === STATE && event.ph === 'i') {
    if (event.name === 'engine') {
      recording.about = numbers;
      recording.costs = numbers.costs ?? [];
    } else if (event.name === 'queues') recording.looks.push({ at, queues: numbers, stats: null });
    else if (event.name === 'stats') {
      const last = recording.looks[recording.looks.length - 1];
      if (last && !last.stats) last.stats = numbers;
    } else if (event.name === 'blocks') {
      for (const row of numbers.rows ?? []) recording.changes.push({ at, row: rowOf(row) });
    }
  }
}

/** A recording as a trace in Chrome's format, for ui.perfetto.dev and for this page. Yields pieces of text. */
export function* traceOf(recording) {
  const names = [[DEVICE, 'device'], [COPIES, 'copies'], [STATE, 'queues and blocks']];
  const lanes = [[DEVICE, 0, 'steps'], [DEVICE, TRAINING_LANE, 'training'], [COPIES, 0, 'device to host'], [COPIES, 1, 'host to device']];
  const micro = (seconds) => Math.round(seconds * 1e9) / 1e3;
  const write = (event) => `,\n${JSON.stringify(event)}`;
  const mark = (name, at, numbers) => write({ ph: 'i', pid: STATE, tid: 0, ts: micro(at), name, args: numbers });
  const bar = (pid, tid, record, name, numbers) =>
    write({ ph: 'X', pid, tid, ts: micro(record.at), dur: micro(record.seconds), name, args: numbers });
  yield `[\n${JSON.stringify({ ph: 'i', pid: STATE, tid: 0, ts: 0, name: 'engine', args: { ...recording.about, costs: recording.costs } })}`;
  for (const [pid, name] of names) yield write({ ph: 'M', pid, tid: 0, ts: 0, name: 'process_name', args: { name } });
  for (const [pid, tid, name] of lanes) yield write({ ph: 'M', pid, tid, ts: 0, name: 'thread_name', args: { name } });
  for (const step of recording.steps) {
    const { at, seconds, training, copies, ...numbers } = step;
    yield bar(DEVICE, 0, step, `step ${step.step}`, numbers);
    yield write({ ph: 'C', pid: DEVICE, tid: 0, ts: micro(at), name: 'batch tokens', args: { decodes: step.decodes, prefill: step['prefill tokens'] } });
  }
  for (const slice of recording.slices) {
    const { at, seconds, action, ...numbers } = slice;
    yield bar(DEVICE, TRAINING_LANE, slice, (action ?? 'run') === 'run' ? 'training' : action, numbers);
  }
  for (const copy of recording.copies) {
    const { at, seconds, inward, ...numbers } = copy;
    yield bar(COPIES, inward ? 1 : 0, copy, inward ? 'swap-in' : 'swap-out', numbers);
  }
  for (const { at, queues, stats } of recording.looks) {
    yield mark('queues', at, queues);
    if (stats) yield mark('stats', at, stats);
  }
  const rows = recording.live ? [...recording.rows.values()].map((row) => ({ at: recording.end, row })) : recording.changes;
  for (const { at, row } of rows) {
    yield mark('blocks', at, { rows: [[row.number, row.request, row.state, row.last, row.cost, row.runs, row.worth]] });
  }
  yield '\n]\n';
}
