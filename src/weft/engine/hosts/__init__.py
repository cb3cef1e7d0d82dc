"""Engines over several hosts: an agent on each host starts its ranks; all agents join node 0 at one secured port."""
