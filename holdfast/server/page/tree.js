// A conversation as a tree of turns: pure functions and one class, without the document and the network.

/** The text of a message item. */
export function textOf(item) {
  return (item.content ?? []).map((part) => part.text ?? '').join('\n');
}

/** What was asked in a turn, for comparing and for titles. */
export function asked(turn) {
  return (turn.input ?? []).map((item) => (item.type === 'message' ? textOf(item) : (item.output ?? item.arguments ?? ''))).join('\n');
}

/** Whether a turn can follow this one. */
export function goesOn(turn) {
  return turn.status === 'completed' || turn.status === 'incomplete' || (turn.status === 'cancelled' && (turn.output ?? []).length > 0);
}

export function isRunning(turn) {
  return turn.status === 'queued' || turn.status === 'in_progress';
}

/** The turns of a conversation. The oldest of siblings comes first. */
export class Tree {
  constructor(turns = [], head = null) {
    this.turns = new Map();
    this.children = new Map([[null, []]]);
    this.head = head; // the turn that the server would go on from
    this.chosen = new Map(); // by parent, the child that was shown last
    for (const turn of turns) this.add(turn);
  }

  add(turn) {
    const parent = this.turns.has(turn.parent) ? turn.parent : null;
    turn.parent = parent;
    this.turns.set(turn.id, turn);
    this.children.set(turn.id, this.children.get(turn.id) ?? []);
    this.children.get(parent).push(turn.id);
    this.choose(turn.id);
  }

  get(id) {
    return this.turns.get(id) ?? null;
  }

  /** Show this turn wherever its ancestors have others to show. */
  choose(id) {
    for (let turn = this.get(id); turn; turn = this.get(turn.parent)) this.chosen.set(turn.parent, turn.id);
  }

  /** The turns from the first one down to `leaf`. */
  path(leaf) {
    const found = [];
    for (let turn = this.get(leaf); turn; turn = this.get(turn.parent)) found.push(turn);
    return found.reverse();
  }

  /** The last turn of the branch that was shown last below a turn; of the whole tree for null. */
  leafBelow(id) {
    let at = id;
    while ((this.children.get(at) ?? []).length > 0) at = this.chosen.get(at) ?? this.children.get(at).at(-1);
    return at;
  }

  /** The siblings of a turn, itself among them. */
  siblings(turn) {
    return this.children.get(turn.parent).map((id) => this.get(id));
  }

  /** Versions of what was asked: of each, its latest turn. */
  questions(turn) {
    const latest = new Map();
    for (const each of this.siblings(turn)) latest.set(asked(each), each);
    latest.set(asked(turn), turn);
    return [...latest.values()];
  }

  /** The answers to the same question. */
  answers(turn) {
    return this.siblings(turn).filter((each) => asked(each) === asked(turn));
  }

  /** The last turn at or above this one that another turn can follow. */
  base(id) {
    let turn = this.get(id);
    while (turn && !goesOn(turn)) turn = this.get(turn.parent);
    return turn;
  }
}
