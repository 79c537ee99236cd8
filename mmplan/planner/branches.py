"""Modules in front of language models that hang together: an encoder with its projector."""

import networkx as nx

from mmplan.scenario.scenario import Scenario


def branches(scenario: Scenario) -> tuple[tuple[str, ...], ...]:
    """Modules that hang together without language models and are fed by none of them, in the order of the model."""
    model = scenario.model
    languages = {module.name for module in model.modules if module.kind == "language_model"}
    graph: nx.Graph[str] = nx.Graph()
    graph.add_nodes_from(module.name for module in model.modules if module.name not in languages)
    graph.add_edges_from((e.producer, e.consumer) for e in model.edges if not {e.producer, e.consumer} & languages)
    fed = {edge.consumer for edge in model.edges if edge.producer in languages}
    order = [module.name for module in model.modules]
    found = [tuple(sorted(names, key=order.index)) for names in nx.connected_components(graph) if not names & fed]
    return tuple(sorted(found, key=lambda names: order.index(names[0]))) if languages else ()
