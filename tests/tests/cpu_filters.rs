//! Filters on the CPU, on rows long enough for several workers and for every decision path.
//!
//! The paths are one pass, a further pass for the mass before a token, and lists of a part or the whole of a row.

mod backends;

use backends::{Cpu, Kind, Shards};
use flash_sampling_conformance::SamplerFactory;
use flash_sampling_conformance::logits::LogitShape;
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_conformance::trial::RowBits;
use flash_sampling_core::reference::{Reference, ReferenceVariant};
use flash_sampling_core::{DType, History, Order, PerturbedArgmax, Plan, RowParams, Samples};
use flash_sampling_cpu::Isa;
use flash_sampling_distributed::ShardMerge;

const THREADS: [usize; 3] = [1, 2, 7];

fn widest() -> Isa {
    Isa::best_for(DType::BF16, DType::BF16)
}

/// Returns the bits and the kept tokens of all rows.
fn outcome(out: &Samples) -> Vec<(RowBits, Option<Vec<u32>>)> {
    let kept = |r| out.row(r).ok().and_then(|row| row.kept).map(|kept| kept.tokens.to_vec());
    (0..).zip(RowBits::all(out)).map(|(r, bits)| (bits, kept(r))).collect()
}

/// Compares the rows of calls with the reference, for several numbers of threads and over shards. Returns the largest
/// number of passes of a row.
fn compare(name: &str, problem: &Problem, plan: Plan, calls: &[Vec<RowParams<'_>>]) -> u32 {
    let mut reference = Reference::new(problem.head(), plan, ReferenceVariant::Tiled);
    let factory = |threads| Cpu::new(Kind::Tiled, widest()).with_threads(threads);
    let alone =
        THREADS.map(|threads| (format!("{threads} threads"), factory(threads).build(problem.head(), plan).unwrap()));
    let (one, two) = (factory(1), factory(2));
    let shards = Shards { name: "cpu", merge: ShardMerge::Winners, shards: &[&one, &two], equal: None };
    let sharded = ("shards".to_owned(), shards.build(problem.head(), plan).unwrap());
    let mut samplers: Vec<_> = alone.into_iter().chain([sharded]).collect();
    let (mut found, mut want, mut most) = (Samples::new(), Samples::new(), 0);
    for (c, rows) in calls.iter().enumerate() {
        reference.sample(problem.input(), rows, &mut want).unwrap();
        let want = outcome(&want);
        for (who, sampler) in &mut samplers {
            sampler.sample(problem.input(), rows, &mut found).unwrap();
            for (r, (found, want)) in outcome(&found).iter().zip(&want).enumerate() {
                assert!(found == want, "{name}, call {c}, {who}, row {r}: {:?}", rows[r]);
            }
            most = found.iter().filter_map(|row| row.ok().map(|row| row.passes)).fold(most, u32::max);
        }
    }
    most
}

#[test]
fn filtered_rows_of_30011_tokens_have_the_reference_bits() {
    const VOCAB: usize = 30_011;
    let llm: Vec<f32> = LogitShape::LlmLike.logits(VOCAB, 171).iter().map(|l| (l * 8.0).round() / 8.0).collect();
    let flat: Vec<f32> = (0..VOCAB).map(|t| (t % 5) as f32 * 0.25).collect();
    let mut integers = Problem::integers(Size::new(3, VOCAB, 40), DType::BF16, DType::BF16, 172);
    integers.scale = Some(0.25);
    let problems = [
        ("LLM-like", Problem::of_logits(&llm, 3)),
        ("flat", Problem::of_logits(&flat, 3)),
        ("tail-heavy", Problem::of_logits(&LogitShape::TailHeavy.logits(VOCAB, 173), 3)),
        ("integers", integers),
    ];
    let history = History::new(&(0..1000).map(|t| t * 29 % VOCAB as u32).collect::<Vec<_>>());
    let mask: Vec<u32> = (0..VOCAB.div_ceil(32) as u32).map(|word| 0x8001_0040u32.rotate_left(word % 32)).collect();
    let base = RowParams { seed: 174, temperature: 0.9, ..RowParams::default() };
    let bases = [
        base,
        RowParams { order: Order::LlamaCpp, ..base },
        RowParams { repetition_penalty: 1.4, presence_penalty: 0.5, history: Some(&history), ..base },
        RowParams { mask: Some(&mask), ..base },
    ];
    let calls: Vec<Vec<RowParams<'_>>> = bases
        .into_iter()
        .flat_map(|row| {
            [
                RowParams { min_p: 0.05, ..row },
                RowParams { top_k: 1024, ..row },
                RowParams { top_k: 1025, ..row },
                RowParams { top_k: 50, top_p: 0.9, ..row },
                RowParams { top_p: 0.2, ..row },
                RowParams { top_p: 0.95, ..row },
                RowParams { min_p: 0.3, top_p: 0.8, ..row },
                RowParams { top_n_sigma: 1.5, top_p: 0.9, ..row },
                RowParams { typical_p: 0.5, ..row },
                RowParams { xtc_threshold: 1e-4, xtc_probability: 1.0, ..row },
            ]
        })
        // One draw, nine draws, and log-probabilities with the kept tokens.
        .map(|row| {
            vec![
                row,
                RowParams { position: 1, draws: 9, ..row },
                RowParams { position: 2, logprobs: Some(4), kept: true, ..row },
            ]
        })
        .collect();
    let plan = Plan { max_rows: 3, max_draws: 9, max_logprobs: Some(4), ..Plan::default() };
    let most = problems.iter().map(|(name, problem)| compare(name, problem, plan, &calls)).max();
    assert!(most > Some(1), "no row took a second pass: {most:?}");
}

#[test]
fn filtered_rows_of_262144_tokens_have_the_reference_bits() {
    const VOCAB: usize = 262_144;
    let base = RowParams { seed: 175, ..RowParams::default() };
    let rows = vec![
        RowParams { top_p: 0.95, ..base },
        RowParams { top_p: 0.5, kept: true, ..base },
        RowParams { top_k: 200_000, top_p: 0.999, ..base },
        RowParams { min_p: 1e-3, draws: 3, ..base },
    ];
    let plan = Plan { max_rows: 4, max_draws: 3, ..Plan::default() };
    for shape in [LogitShape::LlmLike, LogitShape::Flat] {
        compare("long", &Problem::of_logits(&shape.logits(VOCAB, 176), 4), plan, std::slice::from_ref(&rows));
    }
}

/// Puts the likely tokens first, so estimates of the row's mass from the first tokens are wrong.
#[test]
fn rows_with_wrongly_estimated_floors_have_the_reference_bits() {
    const VOCAB: usize = 30_011;
    let bulk = LogitShape::Gaussian.logits(VOCAB, 190);
    let logits: Vec<f32> = (0..).zip(&bulk).map(|(t, l)| if t < 4096 { 3.0 + l } else { 0.25 * l }).collect();
    let problem = Problem::of_logits(&logits, 48);
    let plan = Plan { max_rows: 48, max_draws: 3, ..Plan::default() };
    let base = RowParams { seed: 191, draws: 3, ..RowParams::default() };
    let row = |r: u64| RowParams { position: r, top_p: [0.9, 0.95, 0.6, 0.99][r as usize % 4], ..base };
    let calls: Vec<Vec<RowParams<'_>>> = (0..3).map(|c| (0..48).map(|r| row(c * 48 + r)).collect()).collect();
    let most = compare("wrong estimates", &problem, plan, &calls);
    assert!(most > 1, "no row took a second pass");
}

#[test]
fn many_flat_rows_that_list_what_they_keep_have_the_reference_bits() {
    let problem = Problem::of_logits(&LogitShape::Flat.logits(5_003, 177), 256);
    let row =
        |r: u64| RowParams { seed: 178, position: r, top_p: 0.9, kept: r.is_multiple_of(2), ..RowParams::default() };
    let plan = Plan { max_rows: 256, ..Plan::default() };
    compare("flat", &problem, plan, &[(0..256).map(row).collect()]);
}

#[test]
fn rows_like_a_models_are_decided_by_one_pass() {
    const ROWS: u64 = 128;
    let base = RowParams { seed: 179, ..RowParams::default() };
    let cases = [
        ("top_p 0.9", RowParams { top_p: 0.9, ..base }, 0.98),
        ("top_p 0.95", RowParams { top_p: 0.95, ..base }, 0.99),
        ("min_p 0.05", RowParams { min_p: 0.05, ..base }, 1.0),
        ("top_k 20", RowParams { top_k: 20, ..base }, 1.0),
        ("top_k 50", RowParams { top_k: 50, ..base }, 1.0),
        ("top_k 50, top_p 0.9", RowParams { top_k: 50, top_p: 0.9, ..base }, 1.0),
    ];
    let plan = Plan { max_rows: ROWS as usize, ..Plan::default() };
    let mut once = [0u64; 6];
    let mut out = Samples::new();
    for seed in 0..4 {
        let problem = Problem::of_logits(&LogitShape::LlmLike.logits(30_011, 180 + seed), ROWS as usize);
        let mut sampler = Cpu::new(Kind::Tiled, widest()).build(problem.head(), plan).unwrap();
        for ((_, row, _), once) in cases.iter().zip(&mut once) {
            let rows: Vec<_> = (0..ROWS).map(|position| RowParams { position, ..*row }).collect();
            sampler.sample(problem.input(), &rows, &mut out).unwrap();
            *once += out.iter().filter(|row| row.as_ref().is_ok_and(|row| row.passes == 1)).count() as u64;
        }
    }
    for ((what, _, least), once) in cases.iter().zip(once) {
        let share = once as f64 / (4 * ROWS) as f64;
        println!("{what}: {share}");
        assert!(share >= *least, "{what}: one pass decided {share} of the rows");
    }
    // The control: for rows of equal logits, one pass does not decide the cutoff of top-p.
    let flat = Problem::of_logits(&LogitShape::Flat.logits(30_011, 184), 8);
    let mut sampler = Cpu::new(Kind::Tiled, widest()).build(flat.head(), plan).unwrap();
    let rows: Vec<_> = (0..8).map(|position| RowParams { position, top_p: 0.9, ..base }).collect();
    sampler.sample(flat.input(), &rows, &mut out).unwrap();
    let again = out.iter().filter(|row| row.as_ref().is_ok_and(|row| row.passes > 1)).count();
    assert!(again > 0, "one pass decided top-p of equal logits");
}
