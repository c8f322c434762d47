//! Launches whose kinds state that top-p is the only filter. On Hopper, the largest logits of granules decide them.

use super::backends::assert_same;
use super::backends::gpu::Gpu;
use super::device_filters::{BULK, DeviceCalls, TALL, like_a_models, scattered};
use flash_sampling_conformance::SamplerFactory;
use flash_sampling_conformance::data::normal;
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_conformance::tensor::Tensor;
use flash_sampling_conformance::trial::RowBits;
use flash_sampling_core::reference::{Reference, ReferenceVariant};
use flash_sampling_core::{DType, Head, PerturbedArgmax, Plan, RowParams, Samples};
use flash_sampling_cuda::{KernelChoice, abi};

/// Mixes rows with only top-p and rows without filters. On Hopper, the largest logits of granules and a few other
/// logits decide. The logits have ties, a peak or none, or equal maxima, and vocabularies end within a granule.
#[test]
fn calls_that_know_their_rows_draw_the_same_with_top_p_alone() {
    let Some(_) = Gpu::TILED.device() else { return };
    let base = RowParams { seed: 107, ..RowParams::default() };
    let top_p = |top_p| RowParams { top_p, ..base };
    let kinds =
        [top_p(0.95), base, top_p(0.5), top_p(0.02), top_p(0.999), RowParams { temperature: 0.0, ..base }, top_p(0.8)];
    let (mut wrong, mut others, mut decided, mut all) = (Vec::new(), 0, 0, 0);
    for (count, vocab) in [
        (1, 40_003),
        (7, 100),
        (9, 6_007),
        (64, 33_001),
        (80, 9_001),
        (100, 6_007),
        (150, 9_001),
        (200, 9_001),
        (250, 20_000),
    ] {
        let together = Tensor::from_fn(DType::BF16, count, TALL + BULK, |_, k| if k < TALL { 9.0 } else { 0.0 });
        let flat = Tensor::from_fn(DType::BF16, count, TALL + BULK, |_, _| 0.0);
        let bulk = Tensor::from_fn(DType::BF16, count, TALL + BULK, |r, k| match k < TALL {
            true => 0.0,
            false => (3.0 * normal(108, (r * BULK + k) as u64)) as f32,
        });
        let weight = scattered(vocab);
        let mut problems: Vec<_> =
            [like_a_models(count, 109), bulk, together, flat].map(|rows| Problem::new(weight.clone(), rows)).into();
        problems.push(Problem::integers(Size::new(count, vocab, 72), DType::BF16, DType::BF16, 110));
        for (of, problem) in problems.iter().enumerate() {
            let (mut calls, mut known) =
                (DeviceCalls::new(problem, KernelChoice::Fastest), DeviceCalls::new(problem, KernelChoice::Fastest));
            for position in 0..6 {
                let temperature = if of == 4 { 3.0 } else { 1.0 };
                let row = |r: usize| {
                    let kind = kinds[(r + position) % kinds.len()];
                    RowParams { position: position as u64, temperature: kind.temperature * temperature, ..kind }
                };
                let rows: Vec<_> = (0..count).map(row).collect();
                calls.set(&rows);
                assert!(calls.launch(false).unwrap());
                known.set(&rows);
                known.launch_known().unwrap();
                for (r, (want, found)) in calls.draws().iter().zip(known.draws()).enumerate() {
                    let is_filtered = rows[r].top_p < 1.0 && rows[r].temperature > 0.0;
                    let drawn = found.status == abi::status::DRAWN;
                    (all, decided) = (all + usize::from(is_filtered), decided + usize::from(is_filtered && drawn));
                    let bits = |draw: &abi::Draw| (draw.token, draw.score.to_bits(), draw.logit.to_bits(), draw.status);
                    let is_open = want.status == abi::status::UNDECIDED || found.status == abi::status::UNDECIDED;
                    if is_open && is_filtered {
                        continue;
                    }
                    if bits(want) != bits(&found) {
                        wrong.push(format!("{count} x {vocab}, problem {of}, {:?}: {found:?}, not {want:?}", rows[r]));
                    }
                }
                // The control: filters off.
                let off: Vec<_> = rows.iter().map(|row| RowParams { top_p: 1.0, ..*row }).collect();
                let with = known.draws();
                known.set(&off);
                known.launch_known().unwrap();
                others += known.draws().iter().zip(with).filter(|(off, with)| off.token != with.token).count();
            }
        }
    }
    println!("{decided} of {all} rows with top-p were decided; without filters {others} draws are others");
    assert!(wrong.is_empty(), "{} wrong: {:#?}", wrong.len(), &wrong[..wrong.len().min(12)]);
    assert!(decided * 100 >= all * 98, "{decided} of {all} rows were decided");
    assert!(others * 20 > all, "top-p changes but {others} of {all} draws");
}

/// Uses heads whose first token takes each value modulo 4. The kernel reads a row's logits by fours, and four tokens
/// share a block of random words only for some of these heads.
#[test]
fn shards_that_begin_anywhere_have_the_reference_bits_with_top_p_alone() {
    let Some(_) = Gpu::TILED.device() else { return };
    let (count, vocab) = (64, 6_007);
    let problem = Problem::integers(Size::new(count, vocab, 72), DType::BF16, DType::BF16, 111);
    let plan = Plan { max_rows: count, ..Plan::default() };
    let (mut found, mut want, mut plain) = (Samples::new(), Samples::new(), Samples::new());
    let (mut lost, mut all) = (0, 0);
    for first in 4..8 {
        let head = Head::shard(problem.weight.matrix(), first, first + vocab).unwrap();
        let mut reference = Reference::new(head, plan, ReferenceVariant::Tiled);
        let mut sampler = Gpu::Tiled(KernelChoice::Fastest).build(head, plan).unwrap();
        for (top_p, temperature) in [(0.5, 1.0), (0.05, 1.0), (0.5, 2.0), (0.05, 2.0)] {
            let row = |r| RowParams { seed: 112, position: r, temperature, ..RowParams::default() };
            let bare: Vec<_> = (0..count as u64).map(row).collect();
            let rows: Vec<_> = bare.iter().map(|row| RowParams { top_p, ..*row }).collect();
            reference.sample(problem.input(), &rows, &mut want).unwrap();
            sampler.sample(problem.input(), &bare, &mut plain).unwrap();
            sampler.sample(problem.input(), &rows, &mut found).unwrap();
            let what = format!("tokens from {first} on, top-p {top_p}, temperature {temperature}");
            assert_same(&found, &want, &what);
            all += count;
            lost += RowBits::all(&want).iter().zip(&RowBits::all(&plain)).filter(|(kept, plain)| kept != plain).count();
        }
    }
    println!("of {all} rows {lost} lost their plain winner");
    assert!(lost * 3 > all, "the test is to try open rows: {lost} of {all}");
}
