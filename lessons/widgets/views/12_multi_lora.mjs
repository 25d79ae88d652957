// The queue, with those that are passed over; the batch; the slots on the GPU and the adapters that are not in one; and every request: was its adapter there?

export function steps(trace) {
  return trace.steps.length;
}

const NONE = -1;

export function draw(trace, index, kit) {
  const { svg, rect, text, line, box, key, numbers, legend, number, count, color } = kit;
  const { steps: all, params: p, ranks, adapter_of: of } = trace, step = all[index], name = (k) => (k === NONE ? "" : String.fromCharCode(65 + k)), narrow = kit.width < 560;
  const arrived = (i) => all[i].slots.filter((who, slot) => who !== NONE && who !== all[i - 1]?.slots[slot]); // loaded in step i
  const shapes = [], label = (y, words, css = "soft") => shapes.push(text(0, y, words, `small ${css}`)), last = index === all.length - 1;

  // The queue, its head on the left. Who is passed over keeps its place.
  const pitch = narrow ? 20 : 25, room = Math.floor(kit.width / pitch) - 2, shown = step.queue.slice(0, room), passed = step.passed_over.filter((i) => shown.includes(i));
  label(11, step.passed_over.length ? `the queue: ${step.passed_over.length} passed over, their adapters have no slot` : `the queue: ${step.queue.length} waiting, first come, first served`, step.passed_over.length ? "red" : "soft");
  shown.forEach((i, place) => {
    const skipped = passed.includes(i);
    shapes.push(key(`request ${i}`, box(place * pitch, 18, pitch - 4, 22, name(of[i]), skipped ? "red" : color(of[i]), skipped ? `request ${i} is passed over: adapter ${name(of[i])} has no slot` : `request ${i} asks for adapter ${name(of[i])}`)));
  });
  if (step.queue.length > room) shapes.push(text(room * pitch + 2, 33, `+ ${step.queue.length - room}`, "small soft"));

  // The batch, and the same rows as the kernels see them.
  const batch_y = 66, cell = narrow ? 20 : 36, half = narrow ? 8 * cell + 12 : kit.width / 2;
  label(batch_y - 7, `the batch, step ${index}`);
  step.rows.forEach(([i, k], place) => shapes.push(key(`request ${i}`, box(place * cell, batch_y, cell - 4, 22, name(k), color(k), `request ${i}, adapter ${name(k)}`))));
  shapes.push(text(half, batch_y - 7, narrow ? "for the kernels" : `for the kernels: ${count(step.tiles.length, "segment")}, each reads its adapter`, "small soft"));
  const tile = narrow ? Math.min(18, (kit.width - half) / Math.max(8, step.rows.length)) : cell;
  step.tiles.reduce((at, [k, n]) => (shapes.push(box(at, batch_y, n * tile - 3, 22, n > 1 && n * tile > 34 ? `${name(k)} × ${n}` : name(k), color(k))), at + n * tile), half);

  // Slots on the GPU, and the adapters outside. An adapter moves from one row to the other.
  const slot_y = 114, wide = kit.width / 8, now = arrived(index), out_y = slot_y + 46, outside = [...Array(p.adapters).keys()].filter((k) => !step.slots.includes(k)), small = kit.width / 16;
  label(slot_y - 7, `${count(step.slots.length, "slot")} on the GPU${now.length ? `: ${now.map(name).join(", ")} ${now.length > 1 ? "have" : "has"} to be loaded` : ""}`, now.length ? "red" : "soft");
  step.slots.forEach((k, slot) => {
    shapes.push(rect(slot * wide, slot_y, wide - 4, 24, "free"));
    if (k !== NONE) shapes.push(key(`adapter ${k}`, box(slot * wide + 2, slot_y + 2, wide - 8, 20, `${name(k)}${ranks[k] > 8 && !narrow ? ", rank 64" : ""}`, now.includes(k) ? "red" : color(k), `adapter ${name(k)}, rank ${ranks[k]}`)));
  });
  label(out_y - 5, "not in a slot");
  outside.forEach((k, place) => shapes.push(key(`adapter ${k}`, box(place * small, out_y, Math.min(small - 4, 34), 20, name(k), "grey", `adapter ${name(k)}`))));

  // All requests: was the adapter in a slot, or did it have to be loaded?
  const hit_y = out_y + 52, bar = kit.width / trace.requests, began = new Map();
  all.slice(0, index + 1).forEach(({ rows }, i) => {
    const fresh = new Set(arrived(i));
    for (const [r, k] of rows) {
      if (began.has(r)) continue;
      began.set(r, fresh.delete(k)); // the first one waits for the load, the others find it there
    }
  });
  const overtaken = new Set(all.slice(0, index + 1).flatMap(({ passed_over }) => passed_over));
  label(hit_y - 14, narrow ? `the ${trace.requests} requests: was the adapter there?` : `the ${trace.requests} requests in the order in which they came: was their adapter in a slot?`);
  of.forEach((k, r) => {
    const x = r * bar, loaded = began.get(r);
    shapes.push(rect(x, hit_y, bar - (narrow ? 1 : 2), 24, loaded === undefined ? "free" : loaded ? "red" : "green", `request ${r}, adapter ${name(k)}${loaded === undefined ? "" : loaded ? ": loaded" : ": in place"}`));
    if (overtaken.has(r)) shapes.push(kit.path(`M${x + bar / 2 - 1} ${hit_y - 2}l-3 -6h6z`, "area red"));
    if (!narrow) shapes.push(text(x + bar / 2 - 1, hit_y + 38, name(k), "small middle soft"));
  });

  const loads = all.slice(0, index + 1).reduce((sum, _, i) => sum + arrived(i).length, 0), done = began.size;
  const mib = (kib) => (kib >= 1024 ? `${number(kib / 1024, kib % 1024 ? 1 : 0)} MiB` : `${number(kib)} KiB`), loaded = now.map(name).join(", ");
  const why = p.traffic === "round robin" && trace.loads === trace.requests ? `: ${p.adapters} adapters take turns in ${count(p.max_loras, "slot")}, and each is thrown out before its turn comes again`
    : 2 * trace.loads > trace.requests ? `: ${p.max_loras === 1 ? "1 slot is" : `${p.max_loras} slots are`} too few for what these requests ask for` : "";
  return {
    picture: [
      svg(kit.width, hit_y + (narrow ? 30 : 44), `Step ${index}: ${step.slots.map((k) => name(k) || "empty").join(" ")} in the slots, ${loads} loads so far, ${step.passed_over.length} requests passed over.`, ...shapes),
      legend(["blue", "letter and colour: an adapter"], ["green", "in place"], ["red", "loaded; ▾ passed over"], ["grey", "not in a slot"]),
      numbers([number(loads), "loads so far", 2 * loads > done && loads > p.max_loras ? "red" : ""], [`${number(done - loads)} of ${number(done)}`, "found their adapter in place", 2 * loads > done && loads > p.max_loras ? "red" : ""], [overtaken.size, "were passed over", overtaken.size ? "red" : ""],
        [mib(trace.reserved_kib), "reserved for the slots", 2 * trace.used_kib < trace.reserved_kib ? "red" : ""]),
    ],
    text: `Step ${index}: ${loaded ? `adapter${now.length > 1 ? "s" : ""} ${loaded} ${now.length > 1 ? "have" : "has"} to be loaded first` : "every adapter is there"}${step.passed_over.length ? `, and ${count(step.passed_over.length, "request")} ${step.passed_over.length === 1 ? "is" : "are"} passed over until a slot is free` : ""}.`
      + (last ? ` In all ${count(trace.loads, "load")} for ${trace.requests} requests${why}.` : ""),
  };
}
