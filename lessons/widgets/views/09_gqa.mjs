// GPUs as frames: query heads above, the KV heads that lie there below, a line from each query head to what it reads.
// Under them what a token costs: as the model has it, and as the GPUs hold it.

export function steps(trace) {
  return trace.problem ? 1 : trace.head_map.length;
}

export function draw(trace, index, kit) {
  const { svg, rect, text, line, box, key, numbers, legend, number, color } = kit, p = trace.params;
  if (trace.problem) {
    return { picture: [svg(kit.width, 60, trace.problem, rect(0, 8, kit.width, 40, "box red"), text(12, 33, trace.problem, "red bold"))], text: `Impossible: ${trace.problem}.` };
  }
  const { head_map, gpu_of_head, kv_heads_of_gpu, wrong_heads } = trace, gpus = kv_heads_of_gpu.length, each = head_map.length / gpus;
  const gap = 10, least = kit.width < 480 ? 15 : 19, fit = Math.max(1, Math.min(gpus, Math.floor((kit.width + gap) / (each * least + 12 + gap))));
  const per_row = Math.ceil(gpus / Math.ceil(gpus / fit)), frame = (kit.width - gap * (per_row - 1)) / per_row, cell = Math.min(40, (frame - 12) / each), pitch = 116;
  const at = (gpu) => ({ x: (gpu % per_row) * (frame + gap), y: Math.floor(gpu / per_row) * pitch });
  const query = (h) => ({ x: at(gpu_of_head[h]).x + (frame - cell * each) / 2 + (h % each) * cell, y: at(gpu_of_head[h]).y + 24 });
  const kv = (head, gpu) => {
    const there = kv_heads_of_gpu[gpu].indexOf(head), n = kv_heads_of_gpu[gpu].length, wide = Math.min(40, (frame - 12) / n);
    return { x: at(gpu).x + (frame - wide * n) / 2 + there * wide, y: at(gpu).y + 76, wide };
  };
  const shapes = [], lines = [], names = cell >= 16, kib = (bytes) => `${number(bytes / 1024, bytes % 1024 ? 1 : 0)} KiB`;
  kv_heads_of_gpu.forEach((heads, gpu) => {
    shapes.push(rect(at(gpu).x, at(gpu).y + 1, frame, pitch - 12, "outline line"), text(at(gpu).x + 7, at(gpu).y + 15, frame > 50 ? `GPU ${gpu}` : gpu, "small soft"));
    for (const head of heads) {
      const { x, y, wide } = kv(head, gpu), copy = kv_heads_of_gpu.findIndex((others) => others.includes(head)) !== gpu;
      shapes.push(key(`KV ${head} on ${gpu}`, rect(x + 1, y, wide - 2, 24, copy ? `hatch ${color(head)}` : `box ${color(head)}`, `KV head ${head}${copy ? ", a copy" : ""}`)));
      if (wide >= 15) shapes.push(text(x + wide / 2, y + 16, head, "small middle bold"));
    }
  });
  head_map.forEach((head, h) => {
    const wrong = wrong_heads.includes(h), seen = h <= index, home = kv_heads_of_gpu[gpu_of_head[h]].includes(head) ? gpu_of_head[h] : kv_heads_of_gpu.findIndex((heads) => heads.includes(head));
    const from = query(h), to = kv(head, home);
    if (seen) lines.push(line(from.x + cell / 2, from.y + 22, to.x + to.wide / 2, to.y, wrong ? `red${h === index ? " thick" : ""}` : `${color(head)}${h === index ? " thick" : ""}`));
    lines.push(key(`query ${h}`, rect(from.x + 1, from.y, cell - 2, 22, `box ${!seen ? "grey" : wrong ? "red" : color(head)}${seen ? "" : " faint"}`, `query head ${h} reads KV head ${head}`)));
    if (names) lines.push(text(from.x + cell / 2, from.y + 15, h, "small middle"));
  });
  // The frame is what as many KV heads as query heads would cost.
  const top = Math.ceil(gpus / per_row) * pitch, head = kit.width / head_map.length, bars = [];
  const bar = (y, name, cells) => bars.push(text(0, y - 6, name, "small soft"), rect(0, y, kit.width, 20, "free"),
    ...cells.map(([css, title], i) => key(`${y > top + 20 ? "all" : "model"} ${i}`, rect(i * head + 0.5, y, head - 1, 20, css, title))));
  bar(top + 18, `keys and values of one token: ${kib(trace.bytes_per_token)} in the model`, Array.from({ length: p.num_kv_heads }, (_, i) => [`box ${color(i)}`, `KV head ${i}`]));
  if (gpus > 1) {
    bar(top + 62, `and on ${gpus} GPUs together: ${kib(trace.bytes_per_token_per_gpu)} on each`, kv_heads_of_gpu.flatMap((heads, gpu) => heads.map((i) => {
      const copy = kv_heads_of_gpu.findIndex((others) => others.includes(i)) !== gpu;
      return [copy ? `hatch ${color(i)}` : `box ${color(i)}`, `KV head ${i} on GPU ${gpu}${copy ? ", a copy" : ""}`];
    })));
  }
  const was = kit.before?.trace.max_sequences ?? null;
  const wrong = wrong_heads.includes(index), last = index === head_map.length - 1;
  return {
    picture: [
      svg(kit.width, top + (gpus > 1 ? 88 : 44), `${head_map.length} query heads on ${gpus} GPUs read ${p.num_kv_heads} KV heads; ${wrong_heads.length} read a wrong one.`, ...shapes, ...lines, ...bars),
      legend(["blue", "a KV head, and the query heads that read it"], ["free", "what a KV head for every query head would take"], ...(trace.copies > 1 ? [["blue hatched", "a copy of a KV head"]] : []), ...(wrong_heads.length ? [["red", "reads another group’s KV head"]] : [])),
      numbers([kib(trace.bytes_per_token), "cache per token"], [kib(trace.bytes_per_token_per_gpu), "on each GPU"], [trace.copies, trace.copies === 1 ? "copy of each KV head" : "copies of each KV head", trace.copies > 1 ? "red" : ""],
        [number(trace.max_sequences), `sequences of ${number(p.context)} tokens fit${was === null ? "" : ` (before: ${number(was)})`}`], ...(wrong_heads.length ? [[wrong_heads.length, "heads read the wrong one", "red"]] : [])),
    ],
    text: `Query head ${index} reads KV head ${head_map[index]}${wrong ? ", which belongs to another group" : ""}.`
      + (last && wrong_heads.length ? ` ${wrong_heads.length} of ${head_map.length} are wrong, and every shape is right.` : last && trace.copies > 1 ? ` ${gpus} GPUs share ${p.num_kv_heads} KV head${p.num_kv_heads > 1 ? "s" : ""}: each is stored ${trace.copies} times.` : ""),
  };
}
