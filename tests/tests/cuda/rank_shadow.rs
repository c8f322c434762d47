//! Tests of ranks whose shards have a shadow: the draws are equal to the draws of one GPU without a shadow, and each
//! rank counts the rows that fall back on its shard.

use super::backends::gpu_columns::{histories, mask};
use super::backends::gpu_memory::{Copied, captured, copied, part};
use super::backends::gpu_ranks::GpuRanks;
use super::backends::rank_tests::of_cuda;
use super::backends::shadow::WithShadow;
use super::backends::shadow_draws::scaled;
use super::backends::shard_starts;
use super::rank_group::{OnRank, OnRankArrays, call, check, each_rank, group_of, prepare};
use super::same_draws::are_same;
use flash_sampling::GpuExchange;
use flash_sampling::distributed::TIME_LIMIT;
use flash_sampling_conformance::SamplerFactory;
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_conformance::suite::drop_outside_captures;
use flash_sampling_core::{DType, History, PerturbedArgmax, Plan, RowParams, Samples, ShadowBuffer};
use flash_sampling_cuda::abi::status;
use flash_sampling_cuda::{CudaTiled, Device, DeviceAddress, DeviceMatrix};
use std::ops::Range;

/// The size of the vocabulary. With two shards, the second shard begins within a granule.
const VOCAB: usize = 6004;
const HIDDEN: usize = 136;
/// The number of rows of the largest calls: more rows than a launch that reads a shadow can have.
const ROWS: usize = 100;
/// The number of kinds of rows.
const KINDS: usize = 12;
/// The kind of rows whose bounds are not finite on the shard that has the token [`LARGE`].
const UNBOUNDED: usize = 6;
/// The kinds of rows with a mask that forbids all tokens below [`ALLOWED`].
const MASKED: [usize; 2] = [7, 8];
const ALLOWED: u32 = 3002;
/// The token whose weight is 2^60 in the last column. The weights of all other tokens and all hidden states are 0 in
/// that column.
const LARGE: u32 = 4500;

const PLAN: Plan = Plan { max_rows: ROWS, max_draws: 2, max_logprobs: None, canonical: false };

/// Returns a head and hidden states with peaked logits. The hidden state of a row of the kind [`UNBOUNDED`] is 2^45 in
/// the second-last column. All weights are 0 in that column, so the logits are small.
fn problem() -> Problem {
    let base = Problem::gaussian(Size::new(ROWS, VOCAB, HIDDEN), DType::BF16, DType::BF16, 41);
    let (last, wide) = (HIDDEN - 1, HIDDEN - 2);
    let weight = scaled(&base.weight, DType::BF16, |token, k, w| match (token == LARGE as usize, k) {
        (true, k) if k == last => 2f32.powi(60),
        (false, k) if k < wide => w,
        _ => 0.0,
    });
    let peaks: Vec<Vec<f32>> = (0..ROWS).map(|r| weight.row((r * 577 + 37) % VOCAB)).collect();
    let norm = |row: &[f32]| row.iter().map(|x| x * x).sum::<f32>();
    let hidden = scaled(&base.hidden, DType::BF16, |r, k, h| match k {
        k if k < wide => h + 12.0 * peaks[r][k] / norm(&peaks[r]),
        k if k == wide && r % KINDS == UNBOUNDED => 2f32.powi(45),
        _ => 0.0,
    });
    Problem { weight, hidden, ..base }
}

/// The masks of [`rows`]: one allows random tokens, the other allows all tokens from [`ALLOWED`] on.
struct Masks([Vec<u32>; 2]);

impl Masks {
    fn new() -> Masks {
        let bit = |token: u32| u32::from(token >= ALLOWED) << (token % 32);
        let word = |word: u32| (32 * word..32 * word + 32).map(bit).sum();
        Masks([mask(VOCAB), (0..VOCAB.div_ceil(32) as u32).map(word).collect()])
    }
}

/// Returns rows without filters, of [`KINDS`] kinds.
fn rows<'a>(count: usize, Masks([random, upper]): &'a Masks, histories: &'a [History]) -> Vec<RowParams<'a>> {
    let row = |r: usize| {
        let base = RowParams { seed: 60 + r as u64 / 2, position: r as u64, temperature: 0.9, ..RowParams::default() };
        let history = Some(&histories[r % histories.len()]);
        match r % KINDS {
            1 => RowParams { temperature: 0.0, ..base },
            2 => RowParams { mask: Some(random), ..base },
            3 => RowParams { logit_bias: &[(3, 2.0), (4000, 6.0), (5999, -4.0)], ..base },
            4 => RowParams { repetition_penalty: 1.3, frequency_penalty: 0.2, history, ..base },
            5 => RowParams { temperature: 0.3, ..base },
            7 => RowParams { mask: Some(upper), ..base },
            8 => RowParams { mask: Some(upper), logit_bias: &[(10, 5.0), (5000, 6.0)], ..base },
            9 => RowParams { temperature: 2.0, banned: &[5, 6, 5000], ..base },
            10 => RowParams { mask: Some(random), presence_penalty: 0.5, history, ..base },
            11 => RowParams { temperature: 1.5, stop_token_ids: &[9, 5900], min_tokens: 40, ..base },
            _ => base,
        }
    };
    (0..count).map(row).collect()
}

/// Returns the same rows with filters.
fn filtered<'a>(rows: &[RowParams<'a>]) -> Vec<RowParams<'a>> {
    let row = |(r, row): (usize, &RowParams<'a>)| {
        let row = RowParams { temperature: row.temperature.max(0.3), ..*row };
        match r % 3 {
            0 => RowParams { min_p: 0.05, ..row },
            1 => RowParams { top_k: 20, ..row },
            _ => RowParams { top_k: 50, top_p: 0.9, ..row },
        }
    };
    rows.iter().enumerate().map(row).collect()
}

/// Returns the number of rows that the shadow of a shard does not decide.
fn undecided(tokens: &Range<u32>, which: Range<usize>) -> u32 {
    let is_open = |r: &usize| match r % KINDS {
        UNBOUNDED => tokens.contains(&LARGE),
        kind => MASKED.contains(&kind) && tokens.end <= ALLOWED && !tokens.is_empty(),
    };
    which.filter(is_open).count() as u32
}

/// The ranks that have a shadow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shadows {
    All,
    /// The first rank and every second rank after it.
    Even,
    None,
}

impl Shadows {
    fn includes(self, rank: usize) -> bool {
        self == Shadows::All || self == Shadows::Even && rank.is_multiple_of(2)
    }
}

/// A group of ranks, and the tokens of each rank that has a shadow (an empty range for any other rank).
struct Group {
    ranks: Vec<OnRank>,
    shadowed: Vec<Range<u32>>,
}

impl Group {
    /// Creates a group. The shadow may belong to another weight.
    fn new(factory: GpuRanks, problem: &Problem, buffer: &ShadowBuffer, shadows: Shadows) -> Group {
        let starts = shard_starts(&problem.head(), factory.equal);
        let plain = problem.head().split(&starts);
        let with = problem.head().with_shadow(buffer.shadow()).unwrap().split(&starts);
        let either = plain.into_iter().zip(with).enumerate();
        let heads: Vec<_> =
            either.map(|(rank, (plain, with))| if shadows.includes(rank) { with } else { plain }).collect();
        let shadowed = heads.iter().map(|head| if head.shadow().is_some() { head.tokens() } else { 0..0 }).collect();
        let mut ranks = group_of(factory, heads, problem.input(), PLAN, TIME_LIMIT);
        prepare(&mut ranks, 256, factory.exchange == GpuExchange::Peers);
        let group = Group { ranks, shadowed };
        for (rank, tokens) in group.ranks.iter().zip(&group.shadowed) {
            assert_eq!(rank.sampler.capabilities().shadow, !tokens.is_empty());
        }
        group
    }

    fn arrays(&self, rows: &[RowParams<'_>]) -> Vec<OnRankArrays> {
        self.ranks.iter().map(|rank| rank.arrays(rows, VOCAB)).collect()
    }

    /// Returns, for each rank, the number of rows of all complete calls that the shadow did not decide.
    fn totals(&self) -> Vec<u32> {
        self.ranks.iter().map(|rank| rank.sampler.fallback_rows()).collect()
    }

    /// Asserts that every rank has counted the undecided rows of `calls` calls since `before`.
    fn check_totals(&self, before: &[u32], which: Range<usize>, calls: u32, what: &str) {
        let counted: Vec<_> = self.totals().iter().zip(before).map(|(now, before)| now - before).collect();
        let want: Vec<_> = self.shadowed.iter().map(|tokens| calls * undecided(tokens, which.clone())).collect();
        assert_eq!(counted, want, "{what}: rows that fall back");
    }
}

/// Returns a sampler on one GPU without a shadow, and the hidden states in the memory of this GPU.
fn one_gpu(problem: &Problem) -> (Copied, impl Sized, DeviceMatrix) {
    let device = Device::new(0).unwrap();
    let alone = Copied::on(&device, device.context().new_stream().unwrap(), problem.head(), PLAN).unwrap();
    let (memory, hidden) = copied(problem.input(), &alone.stream);
    (alone, memory, hidden)
}

/// Compares calls that wait for the GPU, and calls that do not wait. Calls with filters, and calls of many rows, read
/// the weight.
pub(crate) fn draws_are_those_of_one_gpu(factory: GpuRanks) {
    let (problem, masks, histories) = (problem(), Masks::new(), histories());
    let (mut alone, _memory, hidden) = one_gpu(&problem);
    let buffer = ShadowBuffer::new(&problem.weight.matrix()).unwrap();
    let all = rows(ROWS, &masks, &histories);
    for shadows in [Shadows::All, Shadows::Even, Shadows::None] {
        let mut group = Group::new(factory, &problem, &buffer, shadows);
        for which in [0..KINDS, 0..1, 0..ROWS, 1..2, 5..UNBOUNDED + 1, 7..8, 0..36] {
            let (rows, count) = (&all[which.clone()], which.len());
            let what = format!("{}, {shadows:?}, rows {which:?}", factory.name());
            // Calls of all rows have too many rows for the shadow.
            let (calls, before) = (u32::from(count < ROWS), group.totals());
            let want = alone.waited(&part(&hidden, which.clone()), rows);
            let waited = each_rank(&mut group.ranks, |_, rank| rank.waited(which.clone(), rows));
            for (out, tokens) in waited.iter().zip(&group.shadowed) {
                are_same(factory.exchange, out, &want, &what);
                let by_weight = if tokens.is_empty() { 0 } else { count };
                let want = if count < ROWS { undecided(tokens, which.clone()) as usize } else { by_weight };
                assert_eq!(out.fallback_rows(), want, "{what}: rows that fall back");
            }
            group.check_totals(&before, which.clone(), calls, &what);
            let arrays = group.arrays(rows);
            call(&mut group.ranks, which.clone(), &arrays);
            check(&group.ranks, &arrays, &want, factory.exchange, &what);
            group.check_totals(&before, which, 2 * calls, &what);
        }
        draws_with_filters(factory, (&mut alone, &hidden), &mut group, &filtered(&all[..KINDS]));
        drop_outside_captures(group.ranks);
    }
    drop_outside_captures(alone);
}

/// Compares calls with filters, which read the weight. In a call that waits, every rank with a shadow counts all rows.
/// The total of [`Group::totals`] does not include these rows.
fn draws_with_filters(
    factory: GpuRanks,
    (alone, hidden): (&mut Copied, &DeviceMatrix),
    group: &mut Group,
    rows: &[RowParams<'_>],
) {
    let (which, what) = (0..rows.len(), format!("{}, filters", factory.name()));
    let want = alone.waited(&part(hidden, which.clone()), rows);
    let waited = each_rank(&mut group.ranks, |_, rank| rank.waited(which.clone(), rows));
    for (out, tokens) in waited.iter().zip(&group.shadowed) {
        are_same(factory.exchange, out, &want, &what);
        assert_eq!(out.fallback_rows(), if tokens.is_empty() { 0 } else { rows.len() }, "{what}");
    }
    if factory.exchange == GpuExchange::Peers {
        let (arrays, before) = (group.arrays(rows), group.totals());
        call(&mut group.ranks, which, &arrays);
        check(&group.ranks, &arrays, &want, factory.exchange, &what);
        assert_eq!(group.totals(), before, "{what}");
    }
}

/// Compares draws with weight and hidden states in host memory, including rows of several draws, and calls with some
/// rows that need all logits.
pub(crate) fn draws_from_host_memory_are_those_of_one_gpu(factory: GpuRanks) {
    let (problem, masks, histories) = (problem(), Masks::new(), histories());
    let mut alone = CudaTiled::new(problem.head(), PLAN, &Device::new(0).unwrap()).unwrap();
    let mut group = WithShadow(factory).build(problem.head(), PLAN).unwrap();
    assert!(group.capabilities().shadow);
    let first = problem.head().split(&shard_starts(&problem.head(), factory.equal))[0].tokens();
    let plain = rows(KINDS, &masks, &histories);
    let draws: Vec<_> = plain.iter().map(|row| RowParams { draws: 2, ..*row }).collect();
    let mut mixed = plain.clone();
    mixed[0].typical_p = 0.8;
    mixed[5].top_k = 20;
    let fallbacks = undecided(&first, 0..KINDS) as usize;
    for (name, rows, fallbacks) in [
        ("plain", &plain, fallbacks..=fallbacks),
        // A row counts once for each draw.
        ("two draws", &draws, 2 * fallbacks..=2 * fallbacks),
        ("filters", &filtered(&plain), KINDS..=KINDS),
        ("mixed", &mixed, 2 + fallbacks..=KINDS),
    ] {
        let (mut want, mut found) = (Samples::new(), Samples::new());
        let input = problem.input().row_range(0..KINDS);
        alone.sample(input, rows, &mut want).unwrap();
        group.sample(input, rows, &mut found).unwrap();
        let what = format!("{}, host memory, {name}", factory.name());
        are_same(factory.exchange, &found, &want, &what);
        assert!(fallbacks.contains(&found.fallback_rows()), "{what}: {} rows fall back", found.fallback_rows());
        assert_eq!(want.fallback_rows(), 0);
    }
}

/// Replays captured calls. Each replay of a graph draws for other positions, and counts its undecided rows.
pub(crate) fn captured_calls_are_replayed(factory: GpuRanks) {
    let (problem, masks, histories) = (problem(), Masks::new(), histories());
    let (mut alone, _memory, hidden) = one_gpu(&problem);
    let buffer = ShadowBuffer::new(&problem.weight.matrix()).unwrap();
    let mut group = Group::new(factory, &problem, &buffer, Shadows::All);
    let mut rows = rows(KINDS, &masks, &histories);
    let mut arrays = group.arrays(&rows);
    let (mut all_positions, mut graphs) = (Vec::new(), Vec::new());
    for (rank, arrays) in group.ranks.iter_mut().zip(&mut arrays) {
        let positions = rank.stream.alloc_zeros::<u64>(KINDS).unwrap();
        arrays.columns.position = DeviceAddress::of(&positions, &rank.stream);
        rank.stream.synchronize().unwrap();
        all_positions.push(positions);
        let (stream, hidden) = (rank.stream.clone(), rank.states(0..KINDS));
        graphs.push(captured(&stream, || rank.enqueue(hidden, (arrays.columns, arrays.out)).map_err(of_cuda)));
    }
    let mut tokens = Vec::new();
    for step in 0..4 {
        rows.iter_mut().for_each(|row| row.position += 100);
        for (rank, positions) in group.ranks.iter().zip(&mut all_positions) {
            rank.stream.memcpy_htod(&rows.iter().map(|row| row.position).collect::<Vec<_>>(), positions).unwrap();
            rank.stream.synchronize().unwrap();
        }
        let before = group.totals();
        graphs.iter().for_each(|graph| graph.launch().unwrap());
        group.ranks.iter_mut().for_each(|rank| rank.sampler.wait(&rank.stream).unwrap());
        let what = format!("{}, step {step}", factory.name());
        let want = alone.waited(&part(&hidden, 0..KINDS), &rows);
        check(&group.ranks, &arrays, &want, factory.exchange, &what);
        group.check_totals(&before, 0..KINDS, 1, &what);
        tokens.push(want.iter().map(|row| row.unwrap().token()).collect::<Vec<_>>());
    }
    assert!(tokens.windows(2).all(|pair| pair[0] != pair[1]), "{tokens:?}");
    drop(graphs);
    drop_outside_captures((alone, group.ranks));
}

/// The negative control: the shadow of the negated weight excludes the token of a greedy row. Draws without filters
/// change, so these calls read the shadow. Draws with filters do not change, so these calls do not read the shadow.
pub(crate) fn a_wrong_shadow_changes_the_draws(factory: GpuRanks) {
    let (problem, masks, histories) = (problem(), Masks::new(), histories());
    let (mut alone, _memory, hidden) = one_gpu(&problem);
    let negated = scaled(&problem.weight, DType::BF16, |_, _, w| -w);
    let buffer = ShadowBuffer::new(&negated.matrix()).unwrap();
    let mut group = Group::new(factory, &problem, &buffer, Shadows::All);
    let all = rows(KINDS, &masks, &histories);
    let greedy = 1;
    assert_eq!(all[greedy].temperature, 0.0);
    // The call has this row alone, because an undecided row would make the call read the weight.
    let (which, row) = (greedy..greedy + 1, &all[greedy..=greedy]);
    let want = alone.waited(&part(&hidden, which.clone()), row);
    let token = want.row(0).unwrap().token();
    let waited = each_rank(&mut group.ranks, |_, rank| rank.waited(which.clone(), row));
    let arrays = group.arrays(row);
    call(&mut group.ranks, which, &arrays);
    for (rank, (out, arrays)) in group.ranks.iter().zip(waited.iter().zip(&arrays)) {
        assert_ne!(out.row(0).unwrap().token(), token);
        let (drawn, found, ..) = arrays.results.read(&rank.stream)[0];
        assert_eq!(drawn, status::DRAWN);
        assert_ne!(found, i64::from(token));
    }
    draws_with_filters(factory, (&mut alone, &hidden), &mut group, &filtered(&all));
    drop_outside_captures((alone, group.ranks));
}
