// The cases of forward_harness.cu.
#pragma once

// Masks, scores, layouts and data of every kind, by number; says what it is.
constexpr int kKinds = 14;
static std::string make_kind(Case& c, int kind) {
  const int last = c.s_q, some = (c.s_q + 1) / 2;
  auto ragged = [&] {
    c.q_lengths = {1, last, 0, some, last}, c.k_lengths = {c.s_k, c.s_k, 3, 0, (c.s_k + 2) / 3};
  };
  std::string what = "full";
  if (kind == 1 || kind >= 5) c.right = 0, what = "causal";
  if (kind == 2) c.right = 0, c.top_left = true, what = "causal top-left";
  if (kind == 3) c.left = 37, c.right = 5, what = "window 37,5";
  if (kind == 4) c.left = 60, c.right = 0, c.sinks = true, what = "window 60,0, sinks";
  if (kind == 5) c.alibi = true, what += ", alibi";
  if (kind == 6) c.softcap = 15, c.data = Data::large, what += ", softcap, large logits";
  if (kind == 7) ragged(), what += ", varlen";
  if (kind == 8) ragged(), c.left = 20, c.sinks = true, what += ", varlen, window, sinks";
  if (kind == 9) c.b = 4, c.used_k = {c.s_k, 1, 0, (c.s_k + 1) / 2}, what += ", key lengths";
  if (kind == 10) c.data = Data::rising, what += ", rising logits";
  if (kind == 11) c.data = Data::spike, c.strided = true, what += ", spike, strided";
  if (kind == 12) c.data = Data::nan_query, c.b = 2, what += ", nan query rows";
  if (kind == 13) ragged(), c.alibi = c.sinks = c.strided = true, what += ", varlen, alibi, sinks";
  if (kind == 0 && c.type == ForwardType::bf16) c.data = Data::huger_v, what += ", huger v";
  return what;
}

// Query heads of a kv head in one tile: every size of group meets every length of queries, each
// with another mask, score and layout. `every`: of these, each so many'th only.
static void add_packed(const Case& base, int every, int first, auto add) {
  int number = 0;
  for (int group : {1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 33, 64, 71, 128}) {
    for (int s_q : {1, 2, 3, 7, 16, 33, 127, 128, 129}) {
      const int kind = (number * 5 + group) % kKinds;
      if (number++ % every != first % every) continue;
      Case c = base;
      c.row_choice = 2, c.s_q = s_q, c.h_k = group > 16 ? 1 : 2, c.h_q = group * c.h_k;
      c.s_k = std::vector{40, 300, 127, 515, 700, 1}[size_t(number) % 6];
      const std::string what = make_kind(c, kind);
      add(c, "packed " + std::to_string(group) + " x " + std::to_string(s_q) + " by " +
                 std::to_string(c.s_k) + " " + what);
    }
  }
}

// Keys in parts: every number of them meets every length of queries and every kind; fewer keys
// than parts, and many more; one head a tile (MHA, GQA) and heads packed.
static void add_split(const Case& base, int every, int first, auto add) {
  int number = 0;
  for (int splits : {2, 3, 4, 7, 16, 40}) {
    for (int s_q : {1, 2, 5, 63, 64, 129, 300}) {
      for (int kind = 0; kind < kKinds; ++kind) {
        if (number++ % every != first % every) continue;
        Case c = base;
        const int group = std::vector{1, 8, 1, 4, 7, 2, 3}[size_t(number / every) % 7];
        c.splits = splits, c.s_q = s_q, c.h_k = s_q > 100 ? 1 : 2, c.h_q = group * c.h_k;
        c.row_choice = number / every % 4 == 3 ? 1 : 0;
        c.s_k = std::vector{515, 1300, 130, 2600, 1, 777}[size_t(number / every) % 6];
        const std::string what = make_kind(c, kind);
        add(c, "split " + std::to_string(splits) + " of " + std::to_string(c.s_k) + ", " +
                   std::to_string(group) + " x " + std::to_string(s_q) +
                   (c.row_choice == 1 ? " unpacked " : " ") + what);
      }
    }
  }
  // What the plan splits by itself, with every kind.
  for (int kind = first % 2; kind < kKinds; kind += 2) {
    Case c = base;
    c.splits = 0, c.s_q = kind % 3 == 0 ? 20 : 1, c.h_q = 8, c.h_k = kind % 4 == 1 ? 8 : 1,
    c.s_k = 9000;
    if (kind == 10) c.s_k = 3000;  // rising logits stay below what two roundings make of them
    const std::string what = make_kind(c, kind);
    add(c, "split as planned of " + std::to_string(c.s_k) + ", " + std::to_string(c.s_q) +
               " rows, " + std::to_string(c.h_k) + " kv heads, " + what);
  }
}

static std::vector<Case> all_cases() {
  std::vector<Case> cases;
  struct Dims {
    int qk, v;
    bool long_shape;
  };
  const Dims dims[] = {{64, 64, false},   {64, 64, true},    {96, 96, false},   {128, 128, false},
                       {192, 128, false}, {192, 192, false}, {256, 256, false}, {256, 256, true}};
  auto add = [&](Case c, std::string what) {
    c.name = std::string(c.type == ForwardType::bf16 ? "bf16" : "f16") + " d" +
             std::to_string(c.d_qk) + "/" + std::to_string(c.d_v) +
             (c.long_shape ? " long " : " ") + what;
    cases.push_back(c);
  };
  for (ForwardType type : {ForwardType::bf16, ForwardType::f16}) {
    for (Dims d : dims) {
      Case base;
      base.type = type, base.d_qk = d.qk, base.d_v = d.v, base.long_shape = d.long_shape;
      auto sized = [&](int s_q, int s_k) {
        Case c = base;
        c.s_q = s_q, c.s_k = s_k;
        return c;
      };
      const std::string dense = "dense ";
      for (auto [s_q, s_k] : {std::pair{1, 1},
                              {1, 300},
                              {127, 129},
                              {128, 128},
                              {129, 127},
                              {191, 193},
                              {257, 509},
                              {509, 257},
                              {64, 1021},
                              {1021, 64},
                              {640, 640}}) {
        const std::string size = std::to_string(s_q) + "x" + std::to_string(s_k);
        Case c = sized(s_q, s_k);
        add(c, "full " + size);
        c.right = 0;
        add(c, "causal " + size);
        c.top_left = true;
        add(c, "causal top-left " + size);
      }
      Case c = sized(333, 777);
      c.b = 3, c.h_q = 6, c.h_k = 2, c.strided = true;
      add(c, "gqa 6/2 strided full");
      c.right = 0;
      add(c, "gqa 6/2 strided causal");
      c.h_k = 1, c.left = 100, c.right = 17;
      add(c, "mqa strided window 100,17");
      c.left = 300, c.right = 0, c.s_q = 1000;
      add(c, "mqa strided window 300,0 s_q > s_k");
      c.left = 0, c.right = 0;
      add(c, "window 0,0");
      c = sized(900, 900), c.left = 250, c.right = 250;
      add(c, "window 250,250");
      c.left = kUnbounded, c.right = 40;
      add(c, "window inf,40");
      c.left = 10000, c.right = 10000;
      add(c, "window larger than the sequence");
      c = sized(300, 1500), c.data = Data::large, c.h_q = 2, c.h_k = 2;
      add(c, "large logits");
      c.right = 0, c.data = Data::rising;
      add(c, "rising logits causal");
      c.s_q = 1500;
      add(c, "rising logits causal square");
      c.right = kUnbounded, c.data = Data::spike;
      add(c, "spike full");
      c.right = 0;
      add(c, "spike causal");
      if (type == ForwardType::bf16) {
        c.data = Data::huge_v;
        add(c, "huge v causal");
        c.data = Data::huger_v;
        add(c, "huger v causal");
      }
      // In the only key tile, but past what its frozen maximum is taken from.
      Case one = c;
      for (Data data : {Data::spike, Data::rising, Data::huge_v, Data::huger_v}) {
        if (type != ForwardType::bf16 && data >= Data::huge_v) continue;
        const char* what = data == Data::spike    ? "spike"
                           : data == Data::rising ? "rising logits"
                           : data == Data::huge_v ? "huge v"
                                                  : "huger v";
        one.data = data, one.s_q = 150, one.s_k = 90, one.right = kUnbounded;
        add(one, std::string(what) + " in the first key tile full");
        one.s_q = 90, one.right = 0;
        add(one, std::string(what) + " in the first key tile causal");
      }
      c.data = Data::nan_query;
      add(c, "nan query rows");
      c.data = Data::normal, c.online = true;
      add(c, "always online causal");
      c.online = false, c.sinks = true, c.h_q = 4, c.s_k = 700;
      add(c, "sinks causal, empty rows");
      c = sized(300, 900), c.h_q = 4, c.h_k = 2, c.softcap = 15;
      add(c, "softcap full");
      c.right = 0, c.data = Data::large;
      add(c, "softcap causal, large logits");
      c.data = Data::normal, c.alibi = true, c.softcap = 0;
      add(c, "alibi causal");
      c.right = kUnbounded;
      add(c, "alibi full");
      c.s_q = 900, c.s_k = 300, c.right = 0, c.softcap = 30, c.sinks = true;
      add(c, "alibi, softcap, sinks, empty rows");
      c = sized(900, 900), c.alibi = true, c.left = 200, c.right = 0, c.data = Data::rising;
      add(c, "alibi window, rising logits");
      c = sized(400, 500), c.h_q = 4, c.h_k = 2, c.alibi = true, c.softcap = 20, c.right = 0;
      c.q_lengths = {1, 400, 0, 129, 64, 300, 7}, c.k_lengths = {1, 500, 300, 0, 257, 100, 499};
      add(c, "alibi, softcap, varlen causal");
      c = sized(400, 1100), c.scale = -0.1f, c.right = 0;
      add(c, "negative scale");
      c.zero_scale = true;
      add(c, "zero scale");
      c = sized(200, 700), c.b = 4, c.used_k = {700, 1, 0, 333};
      add(c, "key lengths full");
      c.right = 0;
      add(c, "key lengths causal");
      c = sized(400, 500), c.h_q = 4, c.h_k = 2;
      c.q_lengths = {1, 400, 0, 129, 64, 300, 7}, c.k_lengths = {1, 500, 300, 0, 257, 100, 499};
      add(c, "varlen full");
      c.right = 0;
      add(c, "varlen causal");
      c.left = 60;
      add(c, "varlen window 60,0");
      c = sized(300, 0);
      add(c, "no keys");
      c = sized(700, 700), c.b = 2, c.h_q = 40, c.h_k = 40, c.right = 0;
      add(c, "many heads causal");
      // More than works[] has slots.
      c = sized(70, 150), c.h_q = c.h_k = 1500;
      add(c, "many tiles a block");
      c.right = 0, c.alibi = true;
      add(c, "many tiles a block, causal, alibi");
      if (d.qk > 64) {
        c = sized(300, 500), c.d_qk = d.qk - 8, c.d_v = d.v - 24, c.right = 0;
        add(c, "odd dims causal");
      }
    }
    Case c;
    c.type = type, c.d_qk = 8, c.d_v = 40, c.s_q = 300, c.s_k = 500;
    add(c, "odd dims full");
    int shape = 0;
    for (Dims d : dims) {
      Case base;
      base.type = type, base.d_qk = d.qk, base.d_v = d.v, base.long_shape = d.long_shape;
      const bool all = type == ForwardType::bf16 && d.qk == 128;
      add_packed(base, all ? 1 : 4, shape + int(type), add);
      if (!d.long_shape) add_split(base, all ? 3 : 17, shape + int(type), add);
      ++shape;
    }
    // The kernel for short sequences: all of the above where d allows, whatever the length.
    const std::vector<Case> tiled = cases;
    for (Case c : tiled) {
      const bool packed = c.row_choice == 2;
      const bool split = c.name.find(" split ") != std::string::npos;
      if (split || c.type != type || std::max(c.d_qk, c.d_v) > 128 || c.long_shape || c.online ||
          (packed && c.s_q > 33))
        continue;
      c.row_choice = 3;
      c.name += " (short)";
      cases.push_back(c);
    }
  }
  return cases;
}
