// Says in words what a step did, how long things took, and where a conversation lies.

import { TIERS, valueOf } from './engine_data.js';

const count = new Intl.NumberFormat('en');

export function number(value) {
  if (value >= 100 || Number.isInteger(value)) return count.format(Math.round(value));
  return value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

export function duration(seconds) {
  if (seconds < 1e-3) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${(seconds * 1e3).toFixed(seconds < 0.1 ? 1 : 0)} ms`;
  if (seconds < 120) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

export function bytes(value) {
  const power = Math.min(3, Math.max(0, Math.floor(Math.log10(Math.max(1, value)) / 3)));
  return `${number(value / 1000 ** power)} ${['bytes', 'kB', 'MB', 'GB'][power]}`;
}

export function plural(value, one, many = `${one}s`) {
  return `${number(value)} ${value === 1 ? one : many}`;
}

export function shortId(id) {
  if (!id) return 'unknown';
  return id.length <= 14 ? id : `${id.slice(0, 6)}…${id.slice(-5)}`;
}

/** A step's plan in one or a few sentences. */
export function sentence(step, about) {
  const merged = (step.steps ?? 1) > 1;
  const parts = [];
  if (step.decodes) parts.push(plural(step.decodes, 'decode'));
  for (const [request, start, stop] of step.chunks.slice(0, 4)) {
    parts.push(`positions ${number(start)} to ${number(stop)} of request ${shortId(request)} (${plural(stop - start, 'token')})`);
  }
  if (step.chunks.length > 4) parts.push(`${step.chunks.length - 4} more chunks`);
  let text = merged ? `${plural(step.steps, 'step')} from ${step.step} on` : `Step ${step.step}`;
  if (step.tokens) text += ` computed ${parts.join(', ')} in ${duration(step.seconds)}.`;
  else text += step.training ? ' held no request.' : ' computed no tokens.';
  if (!merged && step.predicted) {
    const off = Math.round((step.seconds / step.predicted - 1) * 100);
    text += ` It was expected to take ${duration(step.predicted)} (${off >= 0 ? '+' : '−'}${Math.abs(off)}%).`;
  }
  if (!merged && about.target) text += ` The target is ${duration(about.target)}${step.seconds <= about.target ? '' : step.decodes ? ': it was missed' : ', and no stream waited for this step'}.`;
  if (step.budget && !merged) text += ` There was room for ${plural(step.budget, 'token')}, and ${number(step.tokens)} were used.`;
  if (step['blocks out']) text += ` It began to copy ${plural(step['blocks out'], 'block')} to the host.`;
  if (step['blocks in']) text += ` It began to copy ${plural(step['blocks in'], 'block')} to the device.`;
  if (step.preempted?.length) text += ` ${step.preempted.map(shortId).join(', ')} had to make room.`;
  if (step.training) text += ` Then came training for ${duration(step.training.seconds)}: job ${step.training.job}, step ${step.training.step}.`;
  return text;
}

/** The same as rows of a table. */
export function table(step, recording) {
  const rows = [
    ['step', (step.steps ?? 1) > 1 ? `${step.step} to ${step.step + step.steps - 1}` : String(step.step)],
    ['began', `${(step.at - recording.start).toFixed(3)} s`],
    ['took', duration(step.seconds)],
    ['expected', step.predicted ? duration(step.predicted) : 'not predicted'],
    ['target', recording.about.target ? duration(recording.about.target) : 'none'],
    ['tokens', `${number(step.tokens)}${step.budget ? ` of ${number(step.budget)}` : ''}`],
    ['decodes', number(step.decodes)],
    ['prompt tokens', number(step['prefill tokens'])],
    ['sequences', number(step.segments)],
  ];
  if (step.stages) rows.push(['stages computed', step.stages.map(duration).join(', ')]);
  if (step['blocks out']) rows.push(['blocks to the host', number(step['blocks out'])]);
  if (step['blocks in']) rows.push(['blocks to the device', number(step['blocks in'])]);
  if (step.forwards) rows.push(['forwards', number(step.forwards)], ['idle tokens', number(step['idle tokens'] ?? 0)]);
  if (step.training) rows.push(['training', `${step.training.job}, ${duration(step.training.seconds)}`]);
  if (step.lent) rows.push(['blocks lent to training', number(step.lent)]);
  if (step.preempted?.length) rows.push(['preempted', step.preempted.map(shortId).join(', ')]);
  for (const [request, start, stop] of step.chunks) rows.push([`chunk of ${shortId(request)}`, `${number(start)} to ${number(stop)}`]);
  return rows;
}

/** Where a conversation's blocks lie: `12 dropped, 30 host, 8 device`. */
export function whereabouts(row) {
  return row.runs.map(([letter, blocks]) => `${number(blocks)} ${TIERS[letter]?.name ?? letter}`).join(', ');
}

/** A block of the map in words. */
export function blockWords(row, index, letter, recording, now) {
  const size = recording.about.block_size ?? 16;
  let text = `Conversation ${row.number}${row.request ? ` (request ${shortId(row.request)})` : ''}, ${row.state}: tokens ${number(index * size)} to ${number((index + 1) * size)} are ${TIERS[letter]?.text ?? letter}.`;
  if (row.state === 'running' && letter === '-') text = text.replace('dropped, or not computed yet', 'still to be computed');
  if (row.state !== 'running' && 'dobhk'.includes(letter)) {
    const age = Math.max(now - row.last, 1e-3);
    text += ` Idle for ${row.last ? duration(age) : 'an unknown time'}`;
    const cost = recording.costAt(index);
    const rest = row.worth < 0 ? '/ age' : `× worth ${row.worth.toPrecision(2)} a second`;
    if (cost && row.last) text += `, retention value ${valueOf(row, cost, age).toPrecision(2)} (cost ${cost.toPrecision(2)} ${rest})`;
    text += '.';
  }
  return text;
}
