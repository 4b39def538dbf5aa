// The lanes: steps over time on a canvas, with zoom, drag and selection.

import { firstFrom } from './engine_data.js';
import { duration, number } from './engine_words.js';

const LEAST_SPAN = 0.02;
const MOST_SPAN = 3600;

/** The part of time that is shown, shared by all lanes that are shown together. */
export class Span {
  constructor(seconds) {
    this.seconds = seconds;
    this.end = 0; // seconds since the recording's start; for a live one, behind its present (0: now)
  }

  zoom(factor, around = 1) {
    const before = this.seconds;
    this.seconds = Math.min(MOST_SPAN, Math.max(LEAST_SPAN, before * factor));
    this.end += (this.seconds - before) * (1 - around);
  }
}

const LANES = [
  { name: 'step time', height: 84 },
  { name: 'decodes', height: 40 },
  { name: 'prompt tokens', height: 52 },
  { name: 'copies in ▴ out ▾', height: 34 },
  { name: 'waiting', height: 30 },
];
const TRAINING = { name: 'training', height: 22 };
const AXIS = 18;
const GAP = 6;

export class Lanes {
  constructor(canvas, { onSelect, onZoom, onPan, onHover }) {
    this.canvas = canvas;
    this.context = canvas.getContext('2d', { alpha: false });
    this.handlers = { onSelect, onZoom, onPan, onHover };
    this.hover = null;
    this.pointers = new Map();
    this.moved = false;
    canvas.addEventListener('wheel', (event) => {
      event.preventDefault();
      const box = canvas.getBoundingClientRect();
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) onPan(event.deltaX / box.width);
      else onZoom(Math.exp(Math.sign(event.deltaY) * Math.min(0.5, Math.abs(event.deltaY) / 400)), (event.clientX - box.left) / box.width);
    }, { passive: false });
    canvas.addEventListener('pointerdown', (event) => {
      canvas.setPointerCapture(event.pointerId);
      this.pointers.set(event.pointerId, event.clientX);
      this.moved = false;
    });
    canvas.addEventListener('pointermove', (event) => this.move(event));
    const up = (event) => {
      if (this.pointers.delete(event.pointerId) && !this.moved && event.type === 'pointerup' && !this.pointers.size) {
        onSelect(this.stepUnder(event.clientX));
      }
    };
    canvas.addEventListener('pointerup', up);
    canvas.addEventListener('pointercancel', up);
    canvas.addEventListener('pointerleave', () => {
      this.hover = null;
      onHover(null);
    });
  }

  move(event) {
    const box = this.canvas.getBoundingClientRect();
    const before = this.pointers.get(event.pointerId);
    if (before === undefined) {
      this.hover = event.clientX - box.left;
      this.handlers.onHover(this.stepUnder(event.clientX), event.clientX - box.left);
      return;
    }
    if (Math.abs(event.clientX - before) < 3 && !this.moved) return;
    this.moved = true;
    if (this.pointers.size === 2) {
      const [other] = [...this.pointers].filter(([id]) => id !== event.pointerId).map(([, x]) => x);
      const apart = Math.max(12, Math.abs(before - other));
      this.handlers.onZoom(apart / Math.max(12, Math.abs(event.clientX - other)), (other - box.left) / box.width);
    } else this.handlers.onPan((before - event.clientX) / box.width);
    this.pointers.set(event.pointerId, event.clientX);
  }

  /** The step at a place on the screen. */
  stepUnder(clientX) {
    if (!this.shown) return null;
    const { recording, from, to } = this.shown;
    const box = this.canvas.getBoundingClientRect();
    const pixel = (to - from) / box.width;
    const at = from + (clientX - box.left) * pixel;
    const place = firstFrom(recording.steps, at + pixel);
    let best = null, nearest = Infinity;
    for (let index = Math.max(0, place - 3); index < Math.min(recording.steps.length, place + 3); index++) {
      const step = recording.steps[index];
      const away = at < step.at ? step.at - at : Math.max(0, at - step.at - step.seconds);
      if (away < nearest) [best, nearest] = [step, away];
    }
    return nearest < Math.max(6 * pixel, 0.005) ? best : null;
  }

  draw(recording, from, to, selected, colors) {
    this.shown = { recording, from, to };
    this.ground = colors.panel;
    const lanes = recording.slices.length ? [...LANES, TRAINING] : LANES;
    const width = this.canvas.clientWidth;
    const height = lanes.reduce((sum, lane) => sum + lane.height + GAP, AXIS);
    const scale = window.devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(width * scale) || this.canvas.height !== Math.round(height * scale)) {
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = Math.round(height * scale);
      this.canvas.style.height = `${height}px`;
    }
    if (width < 8) return;
    const paint = this.context;
    paint.setTransform(scale, 0, 0, scale, 0, 0);
    paint.fillStyle = colors.bg;
    paint.fillRect(0, 0, width, height);
    const x = (at) => ((at - from) / (to - from)) * width;
    const { steps } = recording;
    let first = firstFrom(steps, from);
    while (first > 0 && steps[first - 1].at + steps[first - 1].seconds > from) first--;
    const last = firstFrom(steps, to);
    const columns = this.columns(steps, first, last, from, to, Math.ceil(width));
    const target = recording.about.target ?? 0;
    const tops = [];
    let top = 0;
    for (const lane of lanes) {
      tops.push(top);
      paint.fillStyle = colors.panel;
      paint.fillRect(0, top, width, lane.height);
      top += lane.height + GAP;
    }

    // Step time, with idle time as gaps, against the target and what was expected.
    const tallest = Math.max(target * 1.25, columns.mostSeconds * 1.08, 1e-4);
    this.bars(columns, columns.seconds, tallest, tops[0], LANES[0].height, (at) => (target && columns.paced[at] > target ? colors.over : colors.step));
    paint.fillStyle = colors.expected;
    for (let at = 0; at < columns.count; at++) {
      if (columns.predicted[at]) paint.fillRect(columns.left[at], tops[0] + LANES[0].height * (1 - columns.predicted[at] / tallest) - 1, Math.max(2, columns.width[at]), 2);
    }
    if (target) {
      const y = tops[0] + LANES[0].height * (1 - target / tallest);
      paint.strokeStyle = colors.target;
      paint.setLineDash([5, 4]);
      paint.beginPath();
      paint.moveTo(0, y);
      paint.lineTo(width, y);
      paint.stroke();
      paint.setLineDash([]);
      this.label(`target ${duration(target)}`, width - 4, y - 3, colors.target, 'right');
    }
    this.bars(columns, columns.decodes, columns.mostDecodes, tops[1], LANES[1].height, () => colors.decode);
    // Prompt tokens, with what the budget left room for beside the decodes, as far as that is not far above.
    const most = Math.max(columns.mostPrefill, columns.mostRoom > 2 * columns.mostPrefill ? 0 : columns.mostRoom, 1);
    this.bars(columns, columns.prefill, most, tops[2], LANES[2].height, (at) => colors.requests[columns.request[at] % colors.requests.length]);
    paint.fillStyle = colors.expected;
    for (let at = 0; at < columns.count; at++) {
      const { room } = columns;
      if (room[at] && room[at] <= most) paint.fillRect(columns.left[at], tops[2] + LANES[2].height * (1 - room[at] / most), Math.max(2, columns.width[at]), 2);
    }

    // Copies: what each step began, to the device upwards and to the host downwards.
    const middle = tops[3] + LANES[3].height / 2;
    const mostCopied = Math.max(columns.mostCopied, 1);
    for (let at = 0; at < columns.count; at++) {
      const half = LANES[3].height / 2;
      const wide = Math.max(1.5, columns.width[at]);
      if (columns.inward[at]) {
        paint.fillStyle = colors.i;
        const tall = Math.max(2, (columns.inward[at] / mostCopied) * half);
        paint.fillRect(columns.left[at], middle - tall, wide, tall);
      }
      if (columns.outward[at]) {
        paint.fillStyle = colors.o;
        paint.fillRect(columns.left[at], middle, wide, Math.max(2, (columns.outward[at] / mostCopied) * half));
      }
    }
    const mostWaiting = this.waiting(recording, from, to, x, tops[4], colors);
    if (lanes.length > LANES.length) {
      paint.fillStyle = colors.training;
      for (let at = firstFrom(recording.slices, from - 1); at < recording.slices.length && recording.slices[at].at < to; at++) {
        const slice = recording.slices[at];
        paint.fillRect(x(slice.at), tops[5] + 3, Math.max(1, x(slice.at + slice.seconds) - x(slice.at)), TRAINING.height - 6);
      }
    }
    const scales = [columns.count && duration(tallest), columns.count && number(columns.mostDecodes), columns.mostPrefill && number(most), columns.mostCopied && `${number(columns.mostCopied)} blocks`, mostWaiting && number(mostWaiting)];
    for (const [place, lane] of lanes.entries()) this.label(scales[place] ? `${lane.name}, up to ${scales[place]}` : lane.name, 5, tops[place] + 12, colors.muted);
    this.axis(from, to, x, width, height, recording, colors);
    if (selected && selected.at + selected.seconds > from && selected.at < to) {
      paint.strokeStyle = colors.text;
      paint.lineWidth = 1.5;
      paint.strokeRect(x(selected.at) - 1, 0.75, Math.max(3, x(selected.at + selected.seconds) - x(selected.at) + 2), height - AXIS - 2);
      paint.lineWidth = 1;
    }
    if (this.hover !== null) {
      paint.fillStyle = colors.muted;
      paint.fillRect(Math.round(this.hover), 0, 1, height - AXIS);
    }
  }

  /** What to draw: each step alone where there is room, or else all steps that fall on one pixel together. */
  columns(steps, first, last, from, to, width) {
    const number = last - first;
    const alone = number < width / 2;
    const most = alone ? number : width;
    const made = this.made?.size >= most ? this.made : (this.made = { size: most + 64, arrays: Array.from({ length: 11 }, () => new Float32Array(most + 64)) });
    const [left, wide, seconds, predicted, decodes, prefill, request, inward, outward, room, paced] = made.arrays;
    let count = 0, column = NaN, mostSeconds = 0, mostDecodes = 1, mostPrefill = 0, mostCopied = 0, mostRoom = 0;
    const pixels = width / (to - from);
    for (let at = first; at < last; at++) {
      const step = steps[at];
      const start = (step.at - from) * pixels;
      const together = step.steps ?? 1;
      const took = step.seconds / together;
      const out = step['blocks out'] ?? 0, into = step['blocks in'] ?? 0, tokens = step['prefill tokens'];
      let place = count - 1;
      if (alone || Math.floor(start) !== column) {
        column = Math.floor(start);
        place = count++;
        left[place] = alone ? start : column;
        wide[place] = alone ? Math.max(1, step.seconds * pixels - (step.seconds * pixels > 3 ? 1 : 0)) : 1;
        seconds[place] = predicted[place] = decodes[place] = prefill[place] = request[place] = inward[place] = outward[place] = room[place] = paced[place] = 0;
      } else if (!alone) wide[place] = Math.max(1, start + step.seconds * pixels - left[place]);
      if (took > seconds[place]) seconds[place] = took;
      if (step.decodes && took > paced[place]) paced[place] = took; // the target is for streams: without any, none waits
      if (alone && together === 1 && step.predicted) predicted[place] = step.predicted;
      decodes[place] = Math.max(decodes[place], step.decodes / together);
      if (alone && together === 1 && tokens && step.budget) mostRoom = Math.max(mostRoom, (room[place] = step.budget - step.decodes));
      if (tokens > prefill[place]) {
        prefill[place] = tokens;
        request[place] = hash(step.chunks[0]?.[0] ?? '');
      }
      inward[place] += into;
      outward[place] += out;
      mostSeconds = Math.max(mostSeconds, took);
      mostDecodes = Math.max(mostDecodes, step.decodes / together);
      mostPrefill = Math.max(mostPrefill, tokens);
      mostCopied = Math.max(mostCopied, inward[place], outward[place]);
    }
    return { count, left, width: wide, seconds, paced, predicted, decodes, prefill, request, inward, outward, room, mostSeconds, mostDecodes, mostPrefill, mostCopied, mostRoom };
  }

  /** Bars of one lane, of one colour after the other. */
  bars(columns, values, most, top, height, colorOf) {
    const paint = this.context;
    const byColor = new Map();
    for (let at = 0; at < columns.count; at++) {
      if (!values[at]) continue;
      const color = colorOf(at);
      let path = byColor.get(color);
      if (!path) byColor.set(color, (path = []));
      path.push(at);
    }
    for (const [color, places] of byColor) {
      paint.fillStyle = color;
      for (const at of places) {
        const tall = Math.max(1, (values[at] / most) * height);
        paint.fillRect(columns.left[at], top + height - tall, columns.width[at], tall);
      }
    }
  }

  /** The number of requests that wait. Returns the highest one. */
  waiting(recording, from, to, x, top, colors) {
    const paint = this.context, { looks } = recording;
    const first = Math.max(0, firstFrom(looks, from) - 1);
    let most = 0;
    for (let at = first; at < looks.length && looks[at].at < to; at++) most = Math.max(most, looks[at].queues.waiting);
    paint.fillStyle = colors.waiting;
    for (let at = first; at < looks.length && looks[at].at < to; at++) {
      const { queues } = looks[at];
      if (!queues.waiting) continue;
      const start = x(looks[at].at), stop = x(Math.min(to, looks[at + 1]?.at ?? looks[at].at + 0.25));
      const tall = (queues.waiting / most) * (LANES[4].height - 4);
      paint.fillRect(start, top + LANES[4].height - tall, Math.max(1, stop - start), tall);
    }
    return most;
  }

  axis(from, to, x, width, height, recording, colors) {
    const paint = this.context;
    const about = (to - from) / Math.max(2, width / 90);
    const power = 10 ** Math.floor(Math.log10(about));
    const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= about);
    const zero = recording.live ? this.present : recording.start;
    paint.fillStyle = colors.line;
    for (let at = Math.ceil((from - zero) / step) * step; at + zero < to; at += step) {
      const place = Math.round(x(at + zero));
      paint.fillStyle = colors.line;
      paint.fillRect(place, 0, 1, height - AXIS);
      const digits = step < 1 ? Math.ceil(-Math.log10(step)) : 0;
      if (place > 14 && place < width - 18) this.label(`${at.toFixed(digits).replace(/^-(0(\.0+)?)$/, '$1').replace('-', '−')} s`, place, height - 5, colors.muted, 'center');
    }
  }

  label(text, left, base, color, align = 'left') {
    const paint = this.context;
    paint.font = '11px system-ui, sans-serif';
    paint.textAlign = align;
    paint.strokeStyle = this.ground;
    paint.lineWidth = 3;
    paint.lineJoin = 'round';
    paint.strokeText(text, left, base);
    paint.lineWidth = 1;
    paint.fillStyle = color;
    paint.fillText(text, left, base);
  }
}

/** A small number for a name. */
export function hash(text) {
  let value = 7;
  for (let at = 0; at < text.length; at++) value = (value * 31 + text.charCodeAt(at)) & 0xffff;
  return value;
}
