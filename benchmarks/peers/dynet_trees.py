"""DyNet's side of cells_dynet.py: TreeLSTM with DyNet's own autobatching. Runs in an environment of its own.

The first line on standard input is a JSON object with `weights`, an .npz file, and `strategy`, DyNet's number of the
kind of autobatching; each further line is a run. For each, requests arrive at `arrivals` seconds. Whenever nothing
runs, up to `most` of those that wait become one graph, whose nodes DyNet merges, and are answered together. One JSON
line answers each.
"""

import json
import sys
import time

import numpy as np


def main():
    options = json.loads(sys.stdin.readline())
    import _dynet

    settings = _dynet.DynetParams()
    settings.set_autobatch(options["strategy"])
    settings.set_mem(2048)
    settings.set_random_seed(1)
    settings.init()
    import dynet as dy

    given = np.load(options["weights"])
    hidden = given["w"].shape[0] // 5
    model = dy.ParameterCollection()
    embedding = model.lookup_parameters_from_numpy(given["embedding"])
    leaf_w, leaf_b, label_w, label_b = (
        model.parameters_from_numpy(given[name]) for name in ("leaf_w", "leaf_b", "label_w", "label_b")
    )
    left_w = model.parameters_from_numpy(np.ascontiguousarray(given["w"][:, :hidden]))
    right_w = model.parameters_from_numpy(np.ascontiguousarray(given["w"][:, hidden:]))
    bias = model.parameters_from_numpy(given["b"])

    def part(gates, number):
        return dy.pickrange(gates, number * hidden, (number + 1) * hidden)

    def leaf(token):
        gates = dy.affine_transform([leaf_b, leaf_w, dy.lookup(embedding, token)])
        c = dy.cmult(dy.logistic(part(gates, 0)), dy.tanh(part(gates, 2)))
        return dy.cmult(dy.logistic(part(gates, 1)), dy.tanh(c)), c

    def internal(left, right):
        gates = dy.affine_transform([bias, left_w, left[0], right_w, right[0]])
        c = dy.cmult(dy.logistic(part(gates, 0)), dy.tanh(part(gates, 2)))
        c = c + dy.cmult(dy.logistic(part(gates, 3)), left[1]) + dy.cmult(dy.logistic(part(gates, 4)), right[1])
        return dy.cmult(dy.logistic(part(gates, 1)), dy.tanh(c)), c

    def unfold(tree):
        nodes = [leaf(token) for token in tree["tokens"]]
        for left, right in zip(tree["left"], tree["right"], strict=True):
            nodes.append(internal(nodes[left], nodes[right]))
        return dy.affine_transform([label_b, label_w, nodes[-1][0]])

    def answer(trees):
        dy.renew_cg()
        scores = [unfold(tree) for tree in trees]
        dy.forward(scores)
        return [int(score.npvalue().argmax()) for score in scores]

    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        run = json.loads(line)
        trees, arrivals, most = run["trees"], run["arrivals"], run["most"]
        finished, labels = [None] * len(arrivals), [None] * len(arrivals)
        at, sizes = 0, []
        begin = time.perf_counter()
        while at < len(arrivals):
            now = time.perf_counter() - begin
            if now > run["until"]:
                break
            if arrivals[at] > now:
                time.sleep(min(arrivals[at] - now, 1e-3))
                continue
            end = at
            while end < len(arrivals) and end - at < most and arrivals[end] <= now:
                end += 1
            made = answer([trees[each % len(trees)] for each in range(at, end)])
            now = time.perf_counter() - begin
            finished[at:end], labels[at:end] = [now] * (end - at), made
            sizes.append(end - at)
            at = end
        print(json.dumps({"finished": finished, "labels": labels, "sizes": sizes}), flush=True)


if __name__ == "__main__":
    main()
