"""For engines that ask a manager block by block in each of their steps, and copy in worker processes; imports none.

Who holds what: an open ticket pins its slots from the engine's decision to the engine's word that every worker has
finished; a worker says so only when its copy is over. What a reset overtakes keeps its slots, without keys, until the
workers are known to have let go of them. What a waiting request has found is pinned while the rest is read from tiers,
and no longer than a deadline.
"""
