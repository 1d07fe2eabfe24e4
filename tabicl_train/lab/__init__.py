"""The attention laboratory: experiments that write a folder each, with figures, CSV files and a page (README.md).

It is a plug-in of this package: what it registers here enters as that of any other plug-in does. Nothing here imports
torch, so that help is fast.
"""

from tabicl_train import register
from tabicl_train.lab.sequence_config import SequenceConfig

register.network("sequence", "tabicl_train.lab.sequence_model:SequenceModel", settings=SequenceConfig)
register.network(
    "retrieval", "tabicl_train.lab.retrieval:Retrieval", settings="tabicl_train.lab.retrieval:RetrievalConfig"
)
register.network(
    "scored_sequence",
    "tabicl_train.lab.scored_sequence:ScoredSequence",
    settings="tabicl_train.lab.scored_sequence:ScoredSequenceConfig",
)
register.network(
    "identity_start",
    "tabicl_train.lab.identity_start:IdentityStart",
    settings="tabicl_train.lab.identity_start:IdentityStartConfig",
)
register.network(
    "output_gate", "tabicl_train.lab.output_gate:OutputGate", settings="tabicl_train.lab.output_gate:OutputGateConfig"
)

register.prior("haystack", "tabicl_train.lab.priors.haystack:Haystack")
register.prior("linear_functions", "tabicl_train.lab.priors.linear_functions:LinearFunctions")
register.prior("needle", "tabicl_train.lab.priors.needle:Needle")
register.prior("quantifiers", "tabicl_train.lab.priors.quantifiers:Quantifiers")

register.experiment(
    "fading",
    "tabicl_train.lab.fading:run",
    question="how much weight one relevant key keeps among more and more others",
    packages=("matplotlib",),
)
register.experiment(
    "entropy",
    "tabicl_train.lab.entropy:run",
    question="how even the attention of a network is on longer and longer tables",
    packages=("matplotlib",),
)
register.experiment(
    "attention",
    "tabicl_train.lab.attention:run",
    question="one row of a table through one attention head, step by step",
    packages=("matplotlib",),
)
register.experiment(
    "needle",
    "tabicl_train.lab.needle:run",
    question="which scoring rules still find one matching row among thousands of others",
    trains=True,
)
register.experiment(
    "curriculum",
    "tabicl_train.lab.curriculum:run",
    question="what training on tables of growing lengths does for tables longer than any of them",
    trains=True,
)
register.experiment(
    "classes",
    "tabicl_train.lab.classes:run",
    question="how a network of ten classes predicts a thousand, how well and how fast",
    packages=("matplotlib",),
)
register.experiment(
    "linear",
    "tabicl_train.lab.linear:run",
    question="whether softmax or SSA still predicts linear functions that are larger than in training",
    trains=True,
)
register.experiment(
    "quantifiers",
    "tabicl_train.lab.quantifiers:run",
    question="whether softmax or SSA still tells if all numbers are positive in longer sequences",
    trains=True,
)
register.experiment(
    "rows",
    "tabicl_train.lab.rows:run",
    question="time, memory and scores with 60,000 labeled rows compared with 10,000",
    packages=("matplotlib",),
)
register.experiment(
    "four_tokens",
    "tabicl_train.lab.four_tokens:run",
    question="causal attention of four tokens in numbers",
    packages=("matplotlib",),
)
register.experiment(
    "ranking",
    "tabicl_train.lab.ranking:run",
    question="whether scaling a query changes which key comes first",
    packages=("matplotlib",),
)
register.experiment(
    "codes",
    "tabicl_train.lab.codes:run",
    question="many classes by digits and groups, and by error-correcting output codes",
    packages=("matplotlib",),
)
register.experiment(
    "haystack",
    "tabicl_train.lab.haystack:run",
    question="which scoring rules serve queries that need one row and others that need many",
    trains=True,
)
register.experiment(
    "scores",
    "tabicl_train.lab.scores:run",
    question="linear functions with more scoring functions, or no attention",
    trains=True,
)
register.experiment(
    "long_rows",
    "tabicl_train.lab.long_rows:run",
    question="what growing rows do for tables of up to 32,768 labeled rows",
    trains=True,
)
register.experiment(
    "invariances",
    "tabicl_train.lab.invariances:run",
    question="what changes predictions whatever the weights are",
    packages=("matplotlib",),
)
