// The block map: a line for each conversation, a cell for each block, coloured by where the block lies.

import { blockWords } from './engine_words.js';

const SIZES = [11, 9, 7, 6, 5, 4, 3, 2];
const GAP = 14; // between columns
const FLASH = 900; // milliseconds for which a change is marked
const TALLEST = 460;
const ORDER = { running: 0, waiting: 1, idle: 2 };

export class BlockMap {
  constructor(canvas, onHover) {
    this.canvas = canvas;
    this.context = canvas.getContext('2d', { alpha: false });
    this.lines = [];
    this.marks = []; // of changes: {changed, marks}
    const hover = (event) => {
      const box = canvas.getBoundingClientRect();
      onHover(this.wordsAt(event.clientX - box.left, event.clientY - box.top), event.clientX - box.left, event.clientY - box.top);
    };
    canvas.addEventListener('pointermove', hover);
    canvas.addEventListener('pointerdown', hover);
    canvas.addEventListener('pointerleave', () => onHover(null));
  }

  /** The conversations in the order in which they are shown: what runs, then by when it was last active. */
  static sorted(recording) {
    return [...recording.rows.values()].sort(
      (one, other) => ORDER[one.state] - ORDER[other.state] || other.last - one.last || other.number - one.number,
    );
  }

  /** Where each conversation goes: in columns, with the largest cells that fit. Kept until the blocks change. */
  layout(recording, width) {
    const key = `${recording.version}/${width}`;
    if (this.key === key && this.recording === recording) return;
    this.key = key;
    this.recording = recording;
    const rows = BlockMap.sorted(recording).filter((row) => row.blocks);
    const lengths = rows.map((row) => row.blocks).sort((one, other) => one - other);
    // Among many, the few longest take several lines each, so that the others need not be far apart.
    const longest = Math.max(1, lengths.length > 12 ? lengths[Math.floor(lengths.length * 0.9)] : (lengths.at(-1) ?? 1));
    for (const size of SIZES) {
      const line = Math.min(longest, Math.floor(width / size));
      const columns = Math.max(1, Math.floor((width + GAP) / (line * size + GAP)));
      let lines = 0;
      for (const row of rows) lines += Math.ceil(row.blocks / line);
      const deep = Math.ceil(lines / columns) + 1;
      this.size = size;
      this.tall = size + (size > 4 ? 3 : 1);
      this.line = line;
      this.deep = deep;
      this.wide = line * size + GAP;
      if (deep * this.tall <= TALLEST) break;
    }
    this.lines = [];
    let column = 0, at = 0;
    for (const row of rows) {
      const needed = Math.ceil(row.blocks / this.line);
      if (at > 0 && at + needed > this.deep) [column, at] = [column + 1, 0];
      this.lines.push({ row, left: column * this.wide, top: at * this.tall, lines: needed });
      at += needed;
    }
    this.height = Math.max(40, this.deep * this.tall);
  }

  /** Draw all of it where anything but the marks of changes is other than before, and otherwise the marks alone. */
  draw(recording, now, colors) {
    const width = this.canvas.clientWidth;
    if (width < 8) return;
    this.layout(recording, width);
    this.now = now;
    const scale = window.devicePixelRatio || 1;
    const fresh = this.drawn !== `${this.key}/${scale}/${Math.floor(now)}` || this.colors !== colors || this.shown !== recording;
    if (fresh) {
      this.drawn = `${this.key}/${scale}/${Math.floor(now)}`; // ages show once a second
      this.colors = colors;
      this.shown = recording;
      if (this.canvas.width !== Math.round(width * scale) || this.canvas.height !== Math.round(this.height * scale)) {
        this.canvas.width = Math.round(width * scale);
        this.canvas.height = Math.round(this.height * scale);
        this.canvas.style.height = `${this.height}px`;
      }
      this.context.setTransform(scale, 0, 0, scale, 0, 0);
      this.blocks(width);
    }
    const moment = performance.now();
    for (const { changed, marks } of this.marks) this.mark(marks, Math.max(0, 1 - (moment - changed) / FLASH));
    this.marks = this.marks.filter(({ changed }) => moment - changed < FLASH);
    this.flashing = this.marks.length > 0;
  }

  blocks(width) {
    const { context: paint, colors, now } = this;
    paint.fillStyle = colors.bg;
    paint.fillRect(0, 0, width, this.height);
    const byColor = new Map();
    const moment = performance.now();
    this.marks = [];
    for (const place of this.lines) {
      const { row } = place;
      const faded = row.state === 'idle' && row.last && now - row.last > 60 ? (now - row.last > 600 ? 2 : 1) : 0;
      let index = 0;
      for (const [letter, count] of row.runs) {
        const key = letter + faded;
        let list = byColor.get(key);
        if (!list) byColor.set(key, (list = []));
        this.rectangles(place, index, count, list);
        index += count;
      }
      if (row.before && moment - row.changed < FLASH) this.marks.push({ changed: row.changed, marks: this.changes(place) });
    }
    for (const [key, list] of byColor) {
      const letter = key[0];
      paint.globalAlpha = [1, 0.75, 0.55][Number(key[1])];
      paint.fillStyle = colors[letter] ?? colors['?'];
      const hollow = (letter === '-' || letter === '?') && this.size > 3;
      for (let at = 0; at < list.length; at += 4) {
        if (hollow) paint.fillRect(list[at], list[at + 1] + this.size / 2 - 1, list[at + 2], 2);
        else paint.fillRect(list[at], list[at + 1], list[at + 2], list[at + 3]);
      }
    }
    paint.globalAlpha = 1;
    if (this.size > 4) {
      paint.fillStyle = colors.bg; // lines between the blocks of a run
      for (let at = 1; at < this.line; at++) {
        for (let left = 0; left < width; left += this.wide) paint.fillRect(left + at * this.size - 1, 0, 1, this.height);
      }
    }
  }

  /** The blocks of a conversation that are elsewhere than before, as rectangles. */
  changes(place) {
    const { row } = place;
    const before = row.before.flatMap(([letter, count]) => Array(count).fill(letter));
    const list = [];
    let index = 0;
    for (const [letter, count] of row.runs) {
      for (let at = index; at < index + count; at++) if (before[at] !== undefined && before[at] !== letter) this.rectangles(place, at, 1, list);
      index += count;
    }
    return list;
  }

  /** Underline these rectangles, in the room between the lines. */
  mark(list, strength) {
    const { context: paint, colors } = this;
    for (const [alpha, color] of [[1, colors.bg], [strength, colors.text]]) {
      paint.globalAlpha = alpha;
      paint.fillStyle = color;
      for (let at = 0; at < list.length; at += 4) paint.fillRect(list[at], list[at + 1] + this.size, list[at + 2], this.tall - this.size);
    }
    paint.globalAlpha = 1;
  }

  /** The rectangles of blocks [index, index + count), added to `list` as left, top, width, height. */
  rectangles(place, index, count, list) {
    while (count > 0) {
      const column = index % this.line;
      const some = Math.min(count, this.line - column);
      list.push(place.left + column * this.size, place.top + Math.floor(index / this.line) * this.tall, some * this.size - (this.size > 2 ? 1 : 0), this.size);
      index += some;
      count -= some;
    }
  }

  /** The block at a place on the canvas in words; null beside them. */
  wordsAt(x, y) {
    if (!this.recording) return null;
    for (const place of this.lines) {
      const line = Math.floor((y - place.top) / this.tall);
      const column = Math.floor((x - place.left) / this.size);
      if (line < 0 || line >= place.lines || column < 0 || column >= this.line) continue;
      let index = line * this.line + column;
      const at = index;
      for (const [letter, count] of place.row.runs) {
        if (index < count) return blockWords(place.row, at, letter, this.recording, this.now);
        index -= count;
      }
    }
    return null;
  }
}
