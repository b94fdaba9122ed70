// What a block of a partial kernel works on. tile_scheduler.cuh computes it.
#pragma once

#include "common/draft_tree.h"

namespace ddtree {

struct Request {
  int row0;       // first row in q
  int num_nodes;  // rows in q, one per node
  int prefix;     // tokens before the tree
  int kv_begin;   // first token that any node attends to: with a sliding window the root reaches back furthest
  int kv_start;   // start of the prefix in kv_indices
  DDTREE_HOST_DEVICE int tokens() const { return num_nodes > 0 ? prefix + num_nodes - kv_begin : 0; }
};

struct WorkItem {
  Request request;
  int index;       // index of the request; -1: no work
  int num_chunks;  // chunks of the request; 1: write the output directly
  int begin, end;  // tokens [begin, end): those below `prefix` are the prefix, the rest are the tree
};

// A work item for one KV head and one block of packed rows.
struct Task {
  WorkItem work;
  int item, kv_head, m0;
};

}  // namespace ddtree
