"""Whether Inductor's kernels between packed matmuls may use programmatic dependent launch (PDL).

A kernel launched early starts while its predecessor runs. Inductor lets it read at once what the predecessor does not
write: all else is complete, if every kernel waits for its own predecessor before it lets the next one launch. Kernels
of packed matmuls do not: they let the next one launch first. So a kernel of Inductor after one of them may read nothing
but what that matmul writes, and what was complete before the graph began.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx


def may_launch_early(graph: fx.Graph, matmuls: Collection[object]) -> bool:
    """Return whether no kernel of Inductor can read what may not be written yet.

    Every other operation must read only inputs of the graph, the matmul before it, and operations since that matmul.
    And the next matmul must depend on it, or Inductor might compute the operation after that one.

    Args:
        graph: a part of a model, whose inputs kernels without PDL have written, such as attention's.
        matmuls: the operators of packed matmuls.
    """
    inputs = {node for node in graph.nodes if node.op in ("placeholder", "get_attr")}
    last: fx.Node | None = None
    since: set[fx.Node] = set()
    for node in graph.nodes:
        if node in inputs or node.op == "output":
            continue
        if node.target in matmuls:
            if not since <= _ancestors(node, since):
                return False
            last, since = node, set()
        elif not all(source is last or source in since or source in inputs for source in node.all_input_nodes):
            return False
        else:
            since.add(node)
    return True


def _ancestors(node: fx.Node, among: Collection[fx.Node]) -> set[fx.Node]:
    """Return the nodes of ``among`` that a node depends on, also by way of others of them."""
    found: set[fx.Node] = set()
    reached = list(node.all_input_nodes)
    for source in reached:
        if source in among and source not in found:
            found.add(source)
            reached += source.all_input_nodes
    return found
