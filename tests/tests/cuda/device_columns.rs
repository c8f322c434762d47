//! Calls of `DeviceSampler::enqueue`: parameters and results in device memory, without a wait.

use super::backends::gpu::Gpu;
use super::backends::gpu_columns::{Arrays, Results, VOCAB, histories, mask, rows};
use super::backends::gpu_memory::{Copied, captured, copied, part};
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_conformance::suite::drop_outside_captures;
use flash_sampling_core::{DType, Knob, Plan, RowParams};
use flash_sampling_cuda::DeviceAddress;
use flash_sampling_cuda::abi::{RowColumns, invalid_parameter, status};

#[test]
fn calls_that_do_not_wait_have_the_bits_of_calls_that_do() {
    let Some(_) = Gpu::TILED.device() else { return };
    let (mask, histories) = (mask(VOCAB), histories());
    // More rows than a launch has.
    let count = 300;
    let problem = Problem::gaussian(Size::new(count, VOCAB, 136), DType::BF16, DType::BF16, 17);
    let plan = Plan { max_rows: count, ..Plan::default() };
    let mut there = Copied::new(problem.head(), plan).unwrap();
    let (_memory, hidden) = copied(problem.input(), &there.stream);
    let all = rows(count, &mask, &histories);
    // Calls of one row have few arrays, so they differ in kernels.
    for which in [0..count, 0..17, 0..1, 1..2, 2..3, 3..4, 4..5, 5..6, 6..7, 7..8, 8..9, 9..10, 10..11] {
        let rows = &all[which.clone()];
        let hidden = part(&hidden, which.clone());
        let want = there.waited(&hidden, rows);
        let arrays = Arrays::of(rows, VOCAB, &there.stream);
        let results = Results::new(rows.len(), &there.stream);
        there.enqueue(&hidden, &arrays, &results.columns(&there.stream), 256);
        results.check(&want, &there.stream, &format!("{which:?}"));
    }
    drop_outside_captures(there);
}

/// The kernels store only the logits of octets of rows with filters. Each call moves the filters to other octets, whose
/// memory has logits of earlier calls. A call of one row has no other octet.
#[test]
fn a_few_rows_with_filters_have_the_bits_of_single_rows() {
    let Some(_) = Gpu::TILED.device() else { return };
    let (count, vocab) = (40, 20_008);
    let problem = Problem::gaussian(Size::new(count, vocab, 136), DType::BF16, DType::BF16, 23);
    let mut there = Copied::new(problem.head(), Plan { max_rows: count, ..Plan::default() }).unwrap();
    let (_memory, hidden) = copied(problem.input(), &there.stream);
    let mask = mask(vocab);
    let mut turn = 0;
    for filters in [[13, 37], [2, 21], [30, 31], [8, 39]] {
        for kind in 0..4 {
            turn += 1;
            let row = |r: usize| {
                let base = RowParams { seed: r as u64, position: turn, ..RowParams::default() };
                match (filters.contains(&r), kind) {
                    (true, 0) => RowParams { top_p: 0.8, ..base },
                    // More tokens than a list has.
                    (true, 1) => RowParams { temperature: 30.0, min_p: 0.1, top_p: 0.9, ..base },
                    (true, 2) => RowParams { top_p: 0.9, top_k: 40, mask: Some(&mask), ..base },
                    (true, _) => RowParams { top_p: 0.7, ..base },
                    (false, 2 | 3) if r.is_multiple_of(3) => RowParams { mask: Some(&mask), ..base },
                    (false, _) => base,
                }
            };
            let rows: Vec<_> = (0..count).map(row).collect();
            let arrays = Arrays::of(&rows, vocab, &there.stream);
            let results = Results::new(count, &there.stream);
            there.enqueue(&hidden, &arrays, &results.columns(&there.stream), 0);
            let found = there.stream.clone_dtoh(&results.tokens).unwrap();
            for (r, row) in rows.iter().enumerate() {
                let want = there.waited(&part(&hidden, r..r + 1), core::slice::from_ref(row));
                assert_eq!(
                    found[r],
                    i64::from(want.row(0).unwrap().token()),
                    "filters {filters:?}, kind {kind}, row {r}"
                );
            }
        }
    }
    drop_outside_captures(there);
}

#[test]
fn a_captured_call_reads_its_parameters_when_it_runs() {
    let Some((device, stream)) = Gpu::TILED.with_stream() else { return };
    let problem = Problem::gaussian(Size::new(9, VOCAB, 136), DType::BF16, DType::BF16, 18);
    let mut there = Copied::on(&device, stream, problem.head(), Plan { max_rows: 9, ..Plan::default() }).unwrap();
    let (_memory, hidden) = copied(problem.input(), &there.stream);
    let (mut positions, temperatures) = (there.stream.alloc_zeros::<u64>(9).unwrap(), vec![0.7f32; 9]);
    let temperatures = there.stream.clone_htod(&temperatures).unwrap();
    let top_k = there.stream.clone_htod(&[0i32, 10, 0, 20, 0, 1, 0, 50, 0]).unwrap();
    let columns = RowColumns {
        position: DeviceAddress::of(&positions, &there.stream),
        temperature: DeviceAddress::of(&temperatures, &there.stream),
        top_k: DeviceAddress::of(&top_k, &there.stream),
        ..RowColumns::default()
    };
    let results = Results::new(9, &there.stream);
    let out = results.columns(&there.stream);
    there.sampler.prepare_enqueue(&columns, &out, 0).unwrap();
    there.stream.synchronize().unwrap();
    let (sampler, stream) = (&mut there.sampler, there.stream.clone());
    // SAFETY: all arrays are on this device, with an element a row, and outlive the graph.
    let graph = captured(&stream, || unsafe { sampler.enqueue(&stream, &hidden, &columns, &out) });
    let mut tokens = Vec::new();
    for step in 0..4u64 {
        let rows: Vec<_> = [0u32, 10, 0, 20, 0, 1, 0, 50, 0]
            .into_iter()
            .enumerate()
            .map(|(r, top_k)| RowParams {
                position: 100 * step + r as u64,
                temperature: 0.7,
                top_k,
                ..RowParams::default()
            })
            .collect();
        stream.memcpy_htod(&rows.iter().map(|row| row.position).collect::<Vec<_>>(), &mut positions).unwrap();
        graph.launch().unwrap();
        stream.synchronize().unwrap();
        results.check(&there.waited(&hidden, &rows), &stream, &format!("step {step}"));
        tokens.push(stream.clone_dtoh(&results.tokens).unwrap());
    }
    assert!(tokens.windows(2).all(|pair| pair[0] != pair[1]), "{tokens:?}");
    drop(graph);
    drop_outside_captures(there);
}

/// The device selects the passes of each replay: lists decide all rows; a row has top-p alone; the list of a row of equal
/// logits overflows.
#[test]
fn a_captured_call_makes_the_passes_that_its_rows_need() {
    let Some((device, stream)) = Gpu::TILED.with_stream() else { return };
    const ROWS: usize = 9;
    let shape = Size::new(ROWS, 20_011, 136);
    let problem = Problem::gaussian(shape, DType::BF16, DType::BF16, 20);
    let plan = Plan { max_rows: ROWS, ..Plan::default() };
    let mut there = Copied::on(&device, stream, problem.head(), plan).unwrap();
    let (mut memory, hidden) = copied(problem.input(), &there.stream);
    let states = there.stream.clone_dtoh(&memory).unwrap();
    let (top_k, top_p) = ([0, 10, 0, 20, 0, 1, 0, 50, 0], [1.0, 1.0, 1.0, 0.7, 1.0, 1.0, 1.0, 0.9, 1.0]);
    let counts = there.stream.clone_htod(&top_k.map(|k| k as i32)).unwrap();
    let (mut positions, mut masses) =
        (there.stream.alloc_zeros::<u64>(ROWS).unwrap(), there.stream.clone_htod(&top_p).unwrap());
    let columns = RowColumns {
        position: DeviceAddress::of(&positions, &there.stream),
        top_k: DeviceAddress::of(&counts, &there.stream),
        top_p: DeviceAddress::of(&masses, &there.stream),
        ..RowColumns::default()
    };
    let results = Results::new(ROWS, &there.stream);
    let out = results.columns(&there.stream);
    there.sampler.prepare_enqueue(&columns, &out, 0).unwrap();
    there.stream.synchronize().unwrap();
    let (sampler, stream) = (&mut there.sampler, there.stream.clone());
    // SAFETY: all arrays are on this device, with an element a row, and outlive the graph.
    let graph = captured(&stream, || unsafe { sampler.enqueue(&stream, &hidden, &columns, &out) });
    for (step, [has_top_p, is_flat]) in
        [[false; 2], [true, false], [false; 2], [false, true], [false; 2], [true; 2]].into_iter().enumerate()
    {
        let (mut top_p, mut states) = (top_p, states.clone());
        if has_top_p {
            top_p[4] = 0.5;
        }
        if is_flat {
            let width = states.len() / ROWS;
            states[3 * width..4 * width].fill(0);
        }
        let row = |r: usize| {
            let position = (100 * step + r) as u64;
            RowParams { position, top_k: top_k[r], top_p: top_p[r], ..RowParams::default() }
        };
        let rows: Vec<_> = (0..ROWS).map(row).collect();
        stream.memcpy_htod(&rows.iter().map(|row| row.position).collect::<Vec<_>>(), &mut positions).unwrap();
        stream.memcpy_htod(&top_p, &mut masses).unwrap();
        stream.memcpy_htod(&states, &mut memory).unwrap();
        graph.launch().unwrap();
        stream.synchronize().unwrap();
        results.check(&there.waited(&hidden, &rows), &stream, &format!("step {step}"));
    }
    drop(graph);
    drop_outside_captures(there);
}

#[test]
fn an_invalid_parameter_is_its_rows_status_alone() {
    let Some(_) = Gpu::TILED.device() else { return };
    let problem = Problem::gaussian(Size::new(6, VOCAB, 136), DType::BF16, DType::BF16, 19);
    let mut there = Copied::new(problem.head(), Plan { max_rows: 6, ..Plan::default() }).unwrap();
    let (_memory, hidden) = copied(problem.input(), &there.stream);
    let valid: Vec<_> = (0..6).map(|seed| RowParams { seed, ..RowParams::default() }).collect();
    let want = there.waited(&hidden, &valid);
    let mut rows = valid;
    (rows[1].temperature, rows[4].top_p) = (f32::NAN, 2.0);
    rows[2].banned = &[1, 2, 3];
    let arrays = Arrays::of(&rows, VOCAB, &there.stream);
    let results = Results::new(6, &there.stream);
    // Room for fewer adjusted tokens than row 2 has.
    there.enqueue(&hidden, &arrays, &results.columns(&there.stream), 2);
    for (r, (found, token, ..)) in results.read(&there.stream).into_iter().enumerate() {
        let expected = match r {
            1 => (-1, status::PARAMETERS, Some(Knob::Temperature)),
            2 => (-1, status::PARAMETERS, None),
            4 => (-1, status::PARAMETERS, Some(Knob::TopP)),
            _ => (i64::from(want.row(r).unwrap().token()), status::DRAWN, None),
        };
        assert_eq!((token, found & 0xff, invalid_parameter(found)), expected, "row {r}");
    }
    drop_outside_captures(there);
}
