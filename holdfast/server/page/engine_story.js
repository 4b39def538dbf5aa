// What the engine does, for people who have not met its words: how busy it is, the pace of its streams, who waits and
// why, and what state is kept and what that saved. Pure: from a recording and a time to texts.

import { REASONS, firstFrom } from './engine_data.js';
import { duration, number, plural } from './engine_words.js';

const RATES = 5; // seconds that "now" is over
const MINUTE = 60;
const SILENT = 2; // seconds without a report, after which an engine that is not reached is no longer described
const NOWHERE = '-?'; // letters of blocks that hold no state

/** Times of steps with decodes in [from, to): the median, and the share within `target` seconds; null without any. */
export function paceOf(recording, from, to, target) {
  const times = [];
  let steps = 0;
  let within = 0;
  for (let at = firstFrom(recording.steps, from); at < recording.steps.length && recording.steps[at].at < to; at++) {
    const step = recording.steps[at];
    if (!step.decodes) continue;
    const count = step.steps ?? 1;
    const seconds = step.seconds / count;
    times.push([seconds, count]);
    steps += count;
    if (target && seconds <= target) within += count;
  }
  if (!steps) return null;
  times.sort(([one], [other]) => one - other);
  let passed = 0;
  const median = times.find(([, count]) => (passed += count) * 2 >= steps)[0];
  return { median, steps, kept: target ? within / steps : null };
}

/** The conversations of the block map that have state, and its blocks: of all of them, and of those that are idle. */
export function stateOf(recording) {
  const found = { conversations: 0, blocks: 0, idle: 0, idleBlocks: 0 };
  for (const { state, runs } of recording.rows.values()) {
    const held = runs.reduce((sum, [letter, count]) => sum + (NOWHERE.includes(letter) ? 0 : count), 0);
    if (!held) continue;
    found.conversations += 1;
    found.blocks += held;
    if (state !== 'idle') continue;
    found.idle += 1;
    found.idleBlocks += held;
  }
  return found;
}

/** The five parts of the story at a time, each {term, value, text}, and a headline for all. */
export function storyAt(recording, to) {
  const look = recording.lookAt(to);
  const lost = recording.lost && look && to - look.at > SILENT;
  const work = lost ? unknownWork(recording, to) : workAt(recording, look, to);
  const pace = paceAt(recording, look, to);
  const waiting = waitingAt(look, to);
  const kept = keptAt(recording, look);
  const saved = savedAt(look);
  const headline = lost ? `These are the last figures, from ${duration(to - look.at)} ago.` : headlineOf(recording, look, work, pace);
  return { headline, parts: [work, pace, waiting, kept, saved] };
}

function headlineOf(recording, look, work, pace) {
  if (!look && !recording.steps.length) return 'The engine has reported nothing yet.';
  if (!look) return work.share > 0.005 ? 'The engine is at work.' : 'The engine is idle.'; // a trace without queues
  const { running, waiting: waits } = look.queues;
  if (!running && !waits) return work.share > 0.005 ? 'The engine has just become idle.' : 'The engine is idle: there is nothing to compute.';
  const parts = [`The engine is at work on ${plural(running, 'request')}`];
  if (pace.median) parts.push(`each stream gets a token about every ${duration(pace.median)}`);
  parts.push(waits ? `${plural(waits, 'request waits', 'requests wait')}` : 'nobody waits');
  return `${parts.join('; ')}.`;
}

function workAt(recording, look, to) {
  const rates = recording.rates(Math.max(to - RATES, recording.start), to);
  const rows = look?.queues.rows ?? [];
  const running = look?.queues.running ?? 0;
  const prompts = rows.filter(([, planned, tokens]) => tokens - planned > 1).length;
  const last = recording.steps[firstFrom(recording.steps, to) - 1];
  let text;
  if (running) {
    text = `${plural(Math.max(0, running - prompts), 'stream')} at ${plural(rates.decodes, 'token')} a second in all`;
    if (prompts) text += `; ${plural(prompts, 'prompt is', 'prompts are')} being read`;
    text += '.';
  } else if (last) text = `The last step ended ${duration(Math.max(0, to - last.at - last.seconds))} ago.`;
  else text = recording.live ? 'No request has come since this view was opened.' : 'No step so far.';
  if (rates.training) text += ` ${Math.round(rates.training * 100)}% of the time went to training.`;
  return { term: 'work', value: running || rates.busy > 0.005 ? `${Math.round(rates.busy * 100)}% busy` : 'Idle', text, share: rates.busy };
}

/** The work of an engine that cannot be reached. */
function unknownWork(recording, to) {
  const last = recording.steps[firstFrom(recording.steps, to) - 1];
  const text = last ? `The last step that was reported ended ${duration(Math.max(0, to - last.at - last.seconds))} ago.` : 'No step was reported.';
  return { term: 'work', value: 'Unknown', text, share: 0 };
}

function paceAt(recording, look, to) {
  const { target } = recording.about;
  const running = look?.queues.running ?? 0;
  const now = running ? paceOf(recording, to - RATES, to, target) : null;
  const minute = paceOf(recording, to - MINUTE, to, target);
  const shown = now ?? minute;
  if (!shown) return { term: 'pace', value: 'No stream', text: `No answer was written in the last minute.${target ? ` The target is a token every ${duration(target)}.` : ''}`, median: 0 };
  const value = `A token every ${duration(shown.median).replace(' ', '\u00a0')}`; // the number and its unit stay together
  const when = now ? '' : 'In the last minute. ';
  if (!target) return { term: 'pace', value, text: `${when}No target is set (--tbt-target), so a long prompt may hold up streams.`, median: now?.median ?? 0 };
  const share = minute.kept >= 0.9995 ? 'All' : `${(100 * minute.kept).toFixed(1)}%`;
  return { term: 'pace', value, text: `${share} of the ${plural(minute.steps, 'step')} in the last minute kept the target of ${duration(target)}.`, median: now?.median ?? 0 };
}

function waitingAt(look, to) {
  const waits = look?.queues.waiting ?? 0;
  const text = look?.queues.running ? 'Each request that has come is being worked on.' : 'No request is there.';
  if (!waits) return { term: 'waiting', value: 'Nobody', text };
  const counts = new Map();
  for (const [, reason] of look.queues.first) counts.set(reason, (counts.get(reason) ?? 0) + 1);
  const reasons = [...counts].sort(([, one], [, other]) => other - one).slice(0, 3).map(([reason, count]) => `${number(count)}: ${REASONS[reason] ?? reason}`);
  const first = look.queues.first[0];
  return { term: 'waiting', value: plural(waits, 'request'), text: `${reasons.join('; ')}.${first ? ` The first has waited for ${duration(Math.max(0, to - first[3]))}.` : ''}` };
}

function keptAt(recording, look) {
  const stats = look?.stats;
  const size = recording.about.block_size ?? 16;
  const { idle: conversations, idleBlocks: blocks } = stateOf(recording);
  const below = stats ? (stats.host_blocks_cached ?? 0) + (stats.disk_blocks_cached ?? 0) : 0;
  const kept = stats ? stats.blocks_cached + below : blocks;
  if (!kept && !blocks) return { term: 'kept state', value: 'None', text: 'After an answer, its state stays here for the next turn.' };
  const value = conversations ? plural(conversations, 'conversation') : plural(kept, 'block');
  if (!stats) return { term: 'kept state', value, text: `${number(blocks * size)} tokens.` };
  const share = Math.round((100 * stats.blocks_cached) / Math.max(1, stats.blocks_total));
  const places = [`${number(stats.blocks_cached * size)} tokens on the device (${share < 1 && stats.blocks_cached ? 'under 1' : share}% of its blocks)`];
  if (stats.host_blocks_total) places.push(`${number(stats.host_blocks_cached * size)} on the host`);
  if (stats.disk_blocks_total) places.push(`${number(stats.disk_blocks_cached * size)} on the disk`);
  const looking = recording.live && !recording.rows.size ? ' Which conversations they belong to is being looked up.' : '';
  return { term: 'kept state', value, text: `${places.join(', ')}.${looking}` };
}

function savedAt(look) {
  const stats = look?.stats;
  if (!stats?.prefix_queries) return { term: 'saved', value: 'Nothing yet', text: 'No prompt has come yet.' };
  const { prefix_queries: asked, prefix_hits: hits } = stats;
  if (!hits) return { term: 'saved', value: 'Nothing yet', text: `None of ${plural(asked, 'prompt token')} so far was found in kept state.` };
  const share = Math.round((100 * hits) / asked);
  return { term: 'saved', value: `${share}% of prompt tokens`, text: `${number(hits)} of ${number(asked)} so far were found in kept state, and not computed again.` };
}
