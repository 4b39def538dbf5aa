"""BatchMaker's bookkeeping, compiled: how rows enter the table, become tasks (Algorithm 1), and end. Pure.

All functions share some arguments. `table` is [capacity] of ROW. `sources` [capacity, State inputs] is the item that
each row's next step reads for each input (below 0: zeros). `ready` and `bounds` are those of Queues. `links` holds the
lists of readers, one after the other. `counts` is [released subgraphs, arrived requests], which these functions
increase.
"""

from __future__ import annotations

import numpy as np

from holdfast.cells.compiled import compiled
from holdfast.cells.table import NOBODY

NOT_STARTED = -1.0
RELEASED, ARRIVED = 0, 1


@compiled
def enter(
    table: np.ndarray,
    sources: np.ndarray,
    ready: np.ndarray,
    bounds: np.ndarray,
    links: np.ndarray,
    counts: np.ndarray,
    rows: np.ndarray,
    first: np.ndarray,
    types: np.ndarray,
    steps: np.ndarray,
    subgraph: np.ndarray,
    reader: np.ndarray,
    producer: np.ndarray,
    inputs: np.ndarray,
    offsets: np.ndarray,
    link: int,
    stops: np.ndarray,
    widths: np.ndarray,
    places: np.ndarray,
    batch: int,
) -> None:
    """Write graphs into the table, and add subgraphs that wait for no other one to the queues.

    `rows` are the table's rows, one for each row of a Partition. `offsets` [types] is the index at which the values of
    a type's nodes begin. `link` is the start of free room in `links`, with as many entries as there are rows and edges.
    `stops` [chains, 3] has an entry for each chain that may end early: its row, the number of the returned output that
    ends it, and the value at which it ends. `widths` [types, State inputs] are those of the inputs' arenas, `places`
    [types, outputs] the outputs' places in their rows. `batch` is a number for all these graphs.
    """
    total, next_at = len(rows), offsets.copy()
    for at in range(total):
        row = table[rows[at]]
        kind = types[at]
        row["type"], row["place"] = kind, at
        row["subgraph"] = rows[subgraph[at]]
        row["begin"] = row["at"] = next_at[kind]
        next_at[kind] += steps[at]
        row["end"] = next_at[kind]
        row["fresh"], row["stop_by"] = True, NOBODY
        row["open"] = row["after_count"] = row["needs"] = row["rows_left"] = 0
        row["readers_count"] = row["starts_count"] = 0
        sources[rows[at]] = NOBODY
        table[rows[subgraph[at]]]["rows_left"] += 1
    for place in range(len(stops)):
        row = table[rows[stops[place, 0]]]
        row["stop_by"], row["stop_at"] = stops[place, 1], stops[place, 2]
    for graph in range(len(first)):
        end = first[graph + 1] if graph + 1 < len(first) else total
        request = table[rows[first[graph]]]
        request["arrival"], request["started"], request["stopped"] = counts[ARRIVED], NOT_STARTED, False
        request["batch"], request["rows"] = batch, end - first[graph]
        counts[ARRIVED] += 1
        left = 0
        for at in range(first[graph], end):
            table[rows[at]]["request"] = rows[first[graph]]
            table[rows[at]]["next"] = rows[at + 1] if at + 1 < end else NOBODY
            left += subgraph[at] == at
        request["left"] = left
    for at in range(len(inputs)):
        to, given, position = inputs[at, 0], inputs[at, 1], inputs[at, 2]
        place = places[types[given], inputs[at, 3]]
        sources[rows[to], position] = rows[given] * widths[types[to], position] + place
    _list_readers(table, links, link, rows, subgraph, reader, producer)

    found = np.empty(total, np.int64)
    count = 0
    for at in range(total):
        own = rows[subgraph[at]]
        if table[own]["needs"] == 0:
            if subgraph[at] == at:
                table[own]["queue"] = _next_place(table, counts)
            if table[rows[at]]["open"] == 0:
                table[rows[at]]["order"] = table[own]["queue"] + at
                found[count] = rows[at]
                count += 1
    found = found[:count]
    for at in range(1, count):
        if table[found[at]]["order"] < table[found[at - 1]]["order"]:
            found = found[np.argsort(table["order"][found])]
            break
    for at in range(count):
        _append(ready, bounds, table[found[at]]["type"], found[at])


@compiled
def _list_readers(
    table: np.ndarray,
    links: np.ndarray,
    link: int,
    rows: np.ndarray,
    subgraph: np.ndarray,
    reader: np.ndarray,
    producer: np.ndarray,
) -> None:
    """For each row and subgraph, write the lists of the rows and subgraphs that wait for it."""
    edges = len(reader)
    if not edges:
        return
    for edge in range(edges):
        to, given = subgraph[reader[edge]], subgraph[producer[edge]]
        if to == given:
            table[rows[reader[edge]]]["open"] += 1
            table[rows[producer[edge]]]["after_count"] += 1
        else:
            table[rows[to]]["needs"] += 1
            table[rows[given]]["readers_count"] += 1
    for at in range(len(rows)):
        own = table[rows[subgraph[at]]]
        if table[rows[at]]["open"] == 0 and own["needs"] > 0 and own["rows_left"] > 1:
            own["starts_count"] += 1
    for at in range(len(rows)):
        row = table[rows[at]]
        row["after"], link = link, link + row["after_count"]
        row["readers"], link = link, link + row["readers_count"]
        row["starts"], link = link, link + row["starts_count"]
        row["after_count"] = row["readers_count"] = row["starts_count"] = 0
    for edge in range(edges):
        to, given = subgraph[reader[edge]], subgraph[producer[edge]]
        if to == given:
            row = table[rows[producer[edge]]]
            links[row["after"] + row["after_count"]] = rows[reader[edge]]
            row["after_count"] += 1
        else:
            row = table[rows[given]]
            links[row["readers"] + row["readers_count"]] = rows[to]
            row["readers_count"] += 1
    for at in range(len(rows)):
        own = table[rows[subgraph[at]]]
        if table[rows[at]]["open"] == 0 and own["needs"] > 0 and own["rows_left"] > 1:
            links[own["starts"] + own["starts_count"]] = rows[at]
            own["starts_count"] += 1


@compiled
def _next_place(table: np.ndarray, counts: np.ndarray) -> int:
    """The place in its queue of a subgraph that is released now. The places of its rows follow it."""
    counts[RELEASED] += 1
    place: int = counts[RELEASED] * len(table)
    return place


@compiled
def _append(ready: np.ndarray, bounds: np.ndarray, kind: int, row: int) -> None:
    """Add a row to the end of a queue."""
    if bounds[kind, 1] == ready.shape[1]:
        _centre(ready[kind], bounds[kind])
    ready[kind, bounds[kind, 1]] = row
    bounds[kind, 1] += 1


@compiled
def _centre(queue: np.ndarray, bound: np.ndarray) -> None:
    """Move a queue to the middle of its memory, so that there is room at both ends."""
    length = bound[1] - bound[0]
    begin = (len(queue) - length) // 2
    moved = queue[bound[0] : bound[1]].copy()
    for at in range(length):  # to assign a slice, Numba compiles for 2 s more: it checks the shape, with a message
        queue[begin + at] = moved[at]
    bound[0], bound[1] = begin, begin + length


@compiled
def fills(table: np.ndarray, queue: np.ndarray, bound: np.ndarray, most: int, tasks: int) -> bool:
    """Whether the rows of a queue are enough for this number of tasks of `most` nodes each.

    They are if `most` rows have a step left for each task, or if there are `most` rows for each task.
    """
    if bound[1] - bound[0] >= most * tasks:
        return True
    for place in range(bound[0], bound[1]):
        row = table[queue[place]]
        most -= row["end"] - row["at"] >= tasks
        if most == 0:
            return True
    return False


@compiled
def batch(
    table: np.ndarray,
    sources: np.ndarray,
    ready: np.ndarray,
    bounds: np.ndarray,
    links: np.ndarray,
    kind: int,
    least: int,
    most: int,
    carried: np.ndarray,
    now: float,
    rows: np.ndarray,
    read: np.ndarray,
    at: np.ndarray,
    last: np.ndarray,
    ends: np.ndarray,
    worker: int,
    round_: int,
    widths: np.ndarray,
    pinned: np.ndarray,
    moved: np.ndarray,
) -> tuple[int, int, int]:
    """Batch (Algorithm 1, lines 12 to 23).

    Returns the number of tasks, of entries in `pinned` and of entries in `moved`.

    It writes the nodes of the tasks, one task after the other: `rows`, `read` (for each task [State inputs, nodes]),
    `at` (the places of values and results) and `last` (whether the node is its row's last step). It writes the end of
    each task into `ends`, whose length is MaxTasksToSubmit. `carried` [inputs, 3] has, for each State input that a
    chain takes from its previous step, the input's position, its arena's width and its place. `widths` [State inputs]
    are those of the inputs' arenas.

    With several workers, `round_` is above 0. `pinned` then receives the subgraphs of the round, and `moved` [reads, 2]
    the rows whose state must first be copied from another worker, and that worker.
    """
    states, queue, bound = len(widths), ready[kind], bounds[kind]
    picked = np.empty(most, np.int64)
    begin = pins = moves = tasks = 0
    while tasks < len(ends):
        count = _form(table, queue, bound, most, worker, round_, picked)
        if count == 0 or (tasks > 0 and count < least):
            break
        if round_ > 0:
            pins, moves = _pin(
                table, sources, queue, picked[:count], worker, round_, widths, pinned, pins, moved, moves
            )
        # SubmitBatchedTask (line 17).
        ended = 0
        for node in range(count):
            number = queue[picked[node]]
            row = table[number]
            rows[begin + node], at[begin + node] = number, row["at"]
            for state in range(states):
                read[begin * states + state * count + node] = sources[number, state]
            if row["fresh"]:
                row["fresh"] = False
                for place in range(len(carried)):
                    sources[number, carried[place, 0]] = number * carried[place, 1] + carried[place, 2]
                request = table[row["request"]]
                if request["started"] == NOT_STARTED:
                    request["started"] = now
            row["at"] += 1
            last[begin + node] = row["at"] == row["end"]
            ended += last[begin + node]
        if ended:
            _take_out(queue, bound, picked[:count], last[begin : begin + count])
            _open_readers(table, queue, bound, links, rows[begin : begin + count], last[begin : begin + count])
        begin += count
        ends[tasks] = begin
        tasks += 1
    return tasks, pins, moves


@compiled
def _form(
    table: np.ndarray, queue: np.ndarray, bound: np.ndarray, most: int, worker: int, round_: int, picked: np.ndarray
) -> int:
    """FormBatchedTask (lines 24 to 32): pick the places in the queue of a task's nodes. Returns their number.

    Each node is the ready node of a row. With several workers, rows that are pinned to another worker are left out.
    """
    count = 0
    for place in range(bound[0], bound[1]):
        if round_ > 0:
            pinned = table[table[queue[place]]["subgraph"]]["pinned"]
            if pinned != NOBODY and pinned != worker:
                continue
        picked[count] = place
        count += 1
        if count == most:
            break
    return count


@compiled
def _pin(
    table: np.ndarray,
    sources: np.ndarray,
    queue: np.ndarray,
    picked: np.ndarray,
    worker: int,
    round_: int,
    widths: np.ndarray,
    pinned: np.ndarray,
    pins: int,
    moved: np.ndarray,
    moves: int,
) -> tuple[int, int]:
    """Pin the subgraphs (lines 20 and 21), and note which state must first be copied from other workers."""
    mine = np.uint64(1) << np.uint64(worker)
    for place in picked:
        row = table[queue[place]]
        if row["round"] != round_:
            for state in range(len(widths)):
                source = sources[queue[place], state]
                if source >= 0:
                    given = table[source // widths[state]]
                    if given["copies"] & mine == 0:
                        given["copies"] |= mine
                        moved[moves, 0], moved[moves, 1] = source // widths[state], given["home"]
                        moves += 1
    for place in picked:
        row = table[queue[place]]
        if row["round"] != round_:
            row["round"], row["home"], row["copies"] = round_, worker, mine
            own = table[row["subgraph"]]
            own["pinned"], own["last_round"] = worker, round_
            pinned[pins] = row["subgraph"]
            pins += 1
    return pins, moves


@compiled
def _take_out(queue: np.ndarray, bound: np.ndarray, picked: np.ndarray, last: np.ndarray) -> None:
    """Remove from the queue those rows of a task that have no step left."""
    node = len(picked) - 1
    to = picked[node]
    for place in range(picked[node], bound[0] - 1, -1):
        gone = False
        if node >= 0 and picked[node] == place:
            gone = last[node]
            node -= 1
        if not gone:
            queue[to] = queue[place]
            to -= 1
    bound[0] = to + 1


@compiled
def _open_readers(
    table: np.ndarray, queue: np.ndarray, bound: np.ndarray, links: np.ndarray, rows: np.ndarray, last: np.ndarray
) -> None:
    """UpdateNodesDependency (line 18): rows of the same subgraphs become ready, because tasks run in order."""
    most = 0
    for node in range(len(rows)):
        if last[node]:
            most += table[rows[node]]["after_count"]
    if not most:
        return
    opened, order, count = np.empty(most, np.int64), np.empty(most, np.int64), 0
    for node in range(len(rows)):
        if last[node]:
            row = table[rows[node]]
            for link in range(row["after"], row["after"] + row["after_count"]):
                reader = table[links[link]]
                reader["open"] -= 1
                if reader["open"] == 0:
                    reader["order"] = table[reader["subgraph"]]["queue"] + reader["place"]
                    opened[count], order[count] = links[link], reader["order"]
                    count += 1
    if not count:
        return
    sorted_ = np.argsort(order[:count])
    if bound[0] < count:
        _centre(queue, bound)
    # Rows that come before an opened one move to the front, until all opened rows have their places.
    place, to = bound[0], bound[0] - count
    bound[0] = to
    done = 0
    while done < count:
        new = sorted_[done]
        if place < bound[1] and table[queue[place]]["order"] < order[new]:
            queue[to] = queue[place]
            place += 1
        else:
            queue[to] = opened[new]
            done += 1
        to += 1


@compiled
def unpin(table: np.ndarray, subgraphs: np.ndarray, round_: int) -> None:
    """Unpin the subgraphs of a round that have no later task in flight. A worker's rounds complete in order."""
    for number in subgraphs:
        subgraph = table[number]
        if subgraph["last_round"] == round_:
            subgraph["pinned"] = NOBODY


@compiled
def find_stops(table: np.ndarray, rows: np.ndarray, number: int, output: np.ndarray, stops: np.ndarray) -> None:
    """Mark in `stops` the nodes of a task whose chain ends at its value of the returned output `number`."""
    for node in range(len(rows)):
        row = table[rows[node]]
        if row["stop_by"] == number and output[node] == row["stop_at"]:
            stops[node] = True


@compiled
def complete(
    table: np.ndarray,
    ready: np.ndarray,
    bounds: np.ndarray,
    links: np.ndarray,
    counts: np.ndarray,
    rows: np.ndarray,
    at: np.ndarray,
    last: np.ndarray,
    stops: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """End rows, subgraphs and requests after a round has completed, and release the subgraphs that waited for them.

    `rows`, `at` and `last` were written by `batch`. `stops` marks the nodes that end their chains; it is empty if no
    chain may end early. Returns the first rows of the requests that end, in order of arrival, and for each of them when
    it started and whether a chain of it stopped.
    """
    ended, ends = np.empty(len(rows), np.int64), 0
    stopped = False
    for node in range(len(rows)):
        row = table[rows[node]]
        if row["lost"]:
            continue
        if last[node]:
            ended[ends] = rows[node]
            ends += 1
        elif len(stops) and stops[node]:
            row["end"], row["lost"] = at[node] + 1, True
            table[row["request"]]["stopped"] = True
            ended[ends] = rows[node]
            ends += 1
            stopped = True
    if stopped:
        leave(table, ready, bounds)

    most = 0
    requests, finished = np.empty(ends, np.int64), 0
    done, subgraphs = 0, ended
    for place in range(ends):
        number = table[ended[place]]["subgraph"]
        subgraph = table[number]
        subgraph["rows_left"] -= 1
        if subgraph["rows_left"] == 0:
            subgraphs[done] = number  # before the next read, which may be of the same subgraph
            done += 1
            most += subgraph["readers_count"]
            request = table[subgraph["request"]]
            request["left"] -= 1
            if request["left"] == 0:
                requests[finished] = subgraph["request"]
                finished += 1
    requests = requests[:finished]
    if most:
        released, count = np.empty(most, np.int64), 0
        for number in subgraphs[:done]:
            subgraph = table[number]
            for link in range(subgraph["readers"], subgraph["readers"] + subgraph["readers_count"]):
                reader = table[links[link]]
                reader["needs"] -= 1
                if reader["needs"] == 0:
                    released[count] = links[link]
                    count += 1
        if count:
            _release(table, ready, bounds, links, counts, released[:count])
    if finished > 1:
        requests = requests[np.argsort(table["arrival"][requests])]
    started, early = np.empty(finished, np.float64), np.empty(finished, np.bool_)
    for place in range(finished):
        request = table[requests[place]]
        started[place], early[place] = request["started"], request["stopped"]
    return requests, started, early


@compiled
def _release(
    table: np.ndarray,
    ready: np.ndarray,
    bounds: np.ndarray,
    links: np.ndarray,
    counts: np.ndarray,
    subgraphs: np.ndarray,
) -> None:
    """Add subgraphs whose external dependencies are met to the queues, in the order of requests and graphs."""
    if len(subgraphs) > 1:
        subgraphs = subgraphs[np.argsort(table["place"][subgraphs], kind="mergesort")]
        arrivals = table["arrival"][table["request"][subgraphs]]
        subgraphs = subgraphs[np.argsort(arrivals, kind="mergesort")]
    for number in subgraphs:
        subgraph = table[number]
        subgraph["queue"] = _next_place(table, counts)
        if subgraph["starts_count"] == 0:
            subgraph["order"] = subgraph["queue"] + subgraph["place"]
            _append(ready, bounds, subgraph["type"], number)
        for link in range(subgraph["starts"], subgraph["starts"] + subgraph["starts_count"]):
            row = table[links[link]]
            row["order"] = subgraph["queue"] + row["place"]
            _append(ready, bounds, subgraph["type"], links[link])


@compiled
def rows_of(table: np.ndarray, firsts: np.ndarray) -> np.ndarray:
    """The rows of the requests that have these first rows, one request after the other."""
    count = 0
    for first in firsts:
        count += table[first]["rows"]
    rows, at = np.empty(count, np.int64), 0
    for first in firsts:
        row = first
        while row != NOBODY:
            rows[at] = row
            at += 1
            row = table[row]["next"]
    return rows


@compiled
def free(table: np.ndarray, firsts: np.ndarray, left: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Free requests that have these first rows. Returns their rows, and the batches of which none is left.

    `left` is the number of requests of each batch that are not free.
    """
    rows = rows_of(table, firsts)
    for row in rows:
        table[row]["lost"] = False
    ended, count = np.empty(len(firsts), np.int64), 0
    for first in firsts:
        batch = table[first]["batch"]
        left[batch] -= 1
        if left[batch] == 0:
            ended[count] = batch
            count += 1
    return rows, ended[:count]


@compiled
def leave(table: np.ndarray, ready: np.ndarray, bounds: np.ndarray) -> None:
    """Remove lost rows from the queues."""
    for kind in range(len(bounds)):
        queue, end = ready[kind], bounds[kind, 0]
        for place in range(bounds[kind, 0], bounds[kind, 1]):
            if not table[queue[place]]["lost"]:
                queue[end] = queue[place]
                end += 1
        bounds[kind, 1] = end
