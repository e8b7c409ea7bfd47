"""Discovery: Kademlia, gossip and the swarm view that merges every source of stage records."""
