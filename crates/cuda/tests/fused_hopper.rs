//! Runs blocks of the fused Hopper kernel on the processor. The system's C++ compiler builds the kernel's own headers
//! with an emulator of its threads, barriers, copies and products. The tests compare every draw and list with core's
//! reference.

mod emulated;

use flash_sampling_core::backend::{Adjustment, Row, RowTransform, code_stride, first_invalid};
use flash_sampling_core::reference::tiled;
use flash_sampling_core::{Domain, Head, Matrix, Noise, RowError, ShadowBuffer};

const PLAIN: u32 = 0;
const MASKS_PENALTIES: u32 = 1;
const LISTS: u32 = 2;
const SHADOW: u32 = 3;
const ROOM: usize = 4096;

/// Returns word `i` of the input stream.
fn input(i: u32) -> u32 {
    Noise::new(5, 7).unwrap().word(Domain::Generator, 1, i)
}

/// The negative controls of the draw from a shadow.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Control {
    None,
    /// Norms of residuals that are rounded to 90%.
    SmallErrors,
    /// Digits without the lower one, and bounds of both.
    OneDigit,
    /// Lists that drop candidates without room.
    DroppedCandidates,
}

/// Rounds to bf16, towards zero.
fn bf16(x: f32) -> f32 {
    f32::from_bits(x.to_bits() & 0xffff_0000)
}

struct RowCase {
    seed: u64,
    inv_temperature: f32,
    draw: u32,
    greedy: bool,
    top_k: u32,
    ln_min_p: f64,
    mask: Vec<u32>,
    bias: Vec<(u32, f32)>,
}

struct Launch {
    columns: u32,
    variant: u32,
    tokens: u32,
    first: u32,
    hidden: u32,
    blocks: u32,
    is_backwards: bool,
    soft_cap: f32,
    scale: f32,
    bias: Vec<f32>,
    weight: Vec<f32>,
    states: Vec<f32>,
    rows: Vec<RowCase>,
}

impl Launch {
    /// Creates rows of every kind, with integer inputs whose dot products are exact.
    fn new(at: u32, [columns, rows, tokens, first, hidden, blocks]: [u32; 6], variant: u32) -> Launch {
        let small = |i: u32| (input(at * 1_000_003 + i) % 5) as f32 - 2.0;
        let mut states: Vec<_> = (0..rows * hidden).map(|i| small(i + (1 << 28))).collect();
        let row = |r: u32| RowCase {
            seed: u64::from(at) << 33 | u64::from(r),
            inv_temperature: [1.0, 0.0625, 0.25, 0.001, 0.02, 0.11, 4.0][r as usize % 7],
            draw: r % 3,
            greedy: r % 8 == 7,
            top_k: if variant == LISTS && r % 4 == 1 { 20 } else { 0 },
            ln_min_p: if variant == LISTS && r % 4 == 2 { -2.0 - f64::from(r % 40) / 8.0 } else { f64::NEG_INFINITY },
            mask: match r % 6 {
                4 => (0..(first + tokens).div_ceil(32)).map(|w| input(w + r) & input(w + r + 99)).collect(),
                5 if r % 12 == 5 => vec![1 << 9; (first + tokens) as usize / 33],
                _ => Vec::new(),
            },
            bias: if r % 5 == 3 { vec![(first, 9.0), (first + tokens / 2 + 1, f32::NEG_INFINITY)] } else { vec![] },
        };
        if rows > 14 {
            states[(13 * hidden) as usize] = f32::NAN;
        }
        Launch {
            columns,
            variant,
            tokens,
            first,
            hidden,
            blocks,
            is_backwards: at % 2 == 1,
            soft_cap: if at % 3 == 2 { 40.0 } else { 0.0 },
            scale: if at % 4 == 3 { 0.5 } else { 1.0 },
            bias: (0..tokens).map(|t| if at % 3 == 1 { (t % 7) as f32 * 0.25 } else { 0.0 }).collect(),
            weight: (0..tokens * hidden).map(small).collect(),
            states,
            rows: (0..rows).map(row).collect(),
        }
    }

    /// Creates rows with real inputs, whose dot products are sums in the order of the emulated products.
    fn real(at: u32, shape: [u32; 6], spread: f32) -> Launch {
        let mut launch = Launch::new(at, shape, SHADOW);
        let real = |i: usize| bf16((input(at * 1_000_003 + i as u32) as f32 * 2f32.powi(-31) - 1.0).powi(3) * spread);
        launch.weight.iter_mut().enumerate().for_each(|(i, w)| *w = real(i));
        launch.states.iter_mut().enumerate().filter(|(_, h)| !h.is_nan()).for_each(|(i, h)| *h = real(i + (1 << 27)));
        launch
    }

    /// Creates a greedy row for each hidden state.
    fn greedy([columns, hidden, blocks]: [u32; 3], weight: Vec<f32>, states: Vec<f32>) -> Launch {
        let (rows, tokens) = (states.len() as u32 / hidden, weight.len() as u32 / hidden);
        let mut launch = Launch::new(0, [columns, rows, tokens, 0, hidden, blocks], SHADOW);
        (launch.weight, launch.states) = (weight, states);
        for row in &mut launch.rows {
            (row.greedy, row.inv_temperature, row.mask, row.bias) = (true, 1.0, Vec::new(), Vec::new());
        }
        launch
    }

    /// Writes the shadow of the weight, with the given changes.
    fn write_shadow(&self, control: Control, out: &mut Vec<u8>) {
        let hidden = self.hidden as usize;
        let buffer = ShadowBuffer::new(&Matrix::new(&self.weight, self.tokens as usize, hidden).unwrap()).unwrap();
        let shadow = buffer.shadow();
        let error = |e: f32| if control == Control::SmallErrors { e * 0.9 } else { e };
        let largest = shadow.errors().iter().zip(shadow.norms()).map(|(e, n)| e + n).fold(0.0, f32::max);
        let flag = [Control::OneDigit, Control::DroppedCandidates].map(|flag| u32::from(control == flag));
        let words = [flag[0] | flag[1] << 1, code_stride(hidden) as u32, largest.to_bits()];
        out.extend(words.into_iter().flat_map(u32::to_le_bytes));
        out.extend(shadow.codes().iter().map(|code| *code as u8));
        let numbers = shadow.scales().iter().copied().chain(shadow.errors().iter().map(|e| error(*e)));
        out.extend(numbers.chain(shadow.norms().iter().copied()).flat_map(f32::to_le_bytes));
    }

    fn write(&self, bound_factor: f32, out: &mut Vec<u8>) {
        let mut word = |x: u32| out.extend_from_slice(&x.to_le_bytes());
        let header =
            [self.columns, self.variant, self.is_backwards.into(), self.rows.len() as u32, self.tokens, self.first];
        header.into_iter().chain([self.hidden, self.blocks]).for_each(&mut word);
        let floats = [bound_factor, self.soft_cap, self.scale];
        floats.into_iter().chain(self.bias.iter().copied()).for_each(|x| word(x.to_bits()));
        // Small integers and NaN are exact in bf16.
        let halves = self.weight.iter().chain(&self.states).map(|x| (x.to_bits() >> 16) as u16);
        out.extend(halves.flat_map(u16::to_le_bytes));
        for row in &self.rows {
            out.extend(row.seed.to_le_bytes().into_iter().chain((row.seed + 3).to_le_bytes()));
            let words = [row.inv_temperature.to_bits(), row.draw, row.greedy.into(), row.top_k];
            out.extend(words.into_iter().flat_map(u32::to_le_bytes).chain(row.ln_min_p.to_le_bytes()));
            let masks = [row.mask.len() as u32].into_iter().chain(row.mask.iter().copied());
            let biases = row.bias.iter().flat_map(|&(token, value)| [token, value.to_bits()]);
            let words = masks.chain([row.bias.len() as u32]).chain(biases);
            out.extend(words.flat_map(u32::to_le_bytes));
        }
    }

    /// Returns the transformed logits of a row.
    fn logits(&self, r: usize) -> Result<Vec<f32>, RowError> {
        let hidden = self.hidden as usize;
        let state = &self.states[r * hidden..][..hidden];
        let dots = self.weight.chunks(hidden).map(|w| w.iter().zip(state).map(|(a, b)| a * b).sum());
        let mut logits: Vec<f32> = dots.collect();
        let none = vec![0.0; self.tokens as usize];
        let matrix = Matrix::new(&none, none.len(), 1).unwrap();
        let mut head = Head::shard(matrix, self.first as usize, (self.first + self.tokens) as usize).unwrap();
        if self.soft_cap > 0.0 {
            head = head.with_soft_cap(self.soft_cap).unwrap();
        }
        head.with_scale(self.scale).unwrap().with_bias(&self.bias).unwrap().transform(self.first, &mut logits);
        first_invalid(self.first, &logits).map_or(Ok(()), Err)?;
        let bias = &self.rows[r].bias;
        let adjustments: Vec<_> = bias.iter().map(|&(token, value)| Adjustment::bias(token, value)).collect();
        self.row(r, &adjustments).transform.apply(self.first, &mut logits);
        if logits.iter().all(|&l| l == f32::NEG_INFINITY) { Err(RowError::NoFiniteLogit) } else { Ok(logits) }
    }

    fn row<'a>(&'a self, r: usize, adjustments: &'a [Adjustment]) -> Row<'a> {
        let row = &self.rows[r];
        let mask = (!row.mask.is_empty()).then_some(&*row.mask);
        Row {
            noise: Noise::new(row.seed, row.seed + 3).unwrap(),
            // Listed rows have no noise.
            greedy: row.greedy || row.top_k > 0 || row.ln_min_p > f64::NEG_INFINITY,
            transform: RowTransform { mask, adjustments, inv_temperature: row.inv_temperature },
            first_draw: row.draw,
            draws: 1,
            without_replacement: false,
            logprobs: None,
            raw_logprobs: None,
            logprob_token_ids: &[],
            ranks: false,
            filters: None,
            kept: false,
        }
    }

    /// Returns token, score, logit and status of a row.
    fn expected(&self, r: usize) -> [u32; 4] {
        match self.logits(r) {
            Ok(logits) => {
                let best = tiled(&self.row(r, &[]), self.rows[r].draw, &logits, self.first);
                [best.winner.token, best.winner.score.to_bits(), best.logit.to_bits(), 0]
            }
            Err(RowError::NaN { token }) => [token, 0, 0, 2],
            Err(RowError::PositiveInfinity { token }) => [token, 0, 0, 3],
            Err(_) => [u32::MAX, f32::NEG_INFINITY.to_bits(), f32::NEG_INFINITY.to_bits(), 1],
        }
    }

    /// Checks that every token at or above the cutoff is listed once, that no token is listed twice, and that logits
    /// are right. Returns whether the list is shorter than the row.
    fn check_list(&self, r: usize, cut: u32, keys: &[u64]) -> bool {
        let row = &self.rows[r];
        let Ok(logits) = self.logits(r) else { return false };
        if row.greedy || (row.top_k == 0 && row.ln_min_p == f64::NEG_INFINITY) {
            assert!(keys.is_empty());
            return false;
        }
        let monotone = |x: f32| if x.is_sign_negative() { !x.to_bits() } else { x.to_bits() | 1 << 31 };
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let least = if row.top_k > 0 { f64::NEG_INFINITY } else { f64::from(largest) + row.ln_min_p };
        let mut listed = vec![0; logits.len()];
        for key in keys {
            let at = (!(*key as u32) - self.first) as usize;
            assert_eq!((key >> 32) as u32, monotone(logits[at] + 0.0), "row {r}, token {at}");
            listed[at] += 1;
        }
        for (at, (&logit, &times)) in logits.iter().zip(&listed).enumerate() {
            let is_kept = f64::from(logit) >= least && monotone(logit) >= cut && logit > f32::NEG_INFINITY;
            assert!(times <= 1 && (times == 1 || !is_kept), "row {r}, token {at} is listed {times} times");
        }
        keys.len() < logits.iter().filter(|l| **l > f32::NEG_INFINITY).count()
    }
}

fn launches() -> Vec<Launch> {
    let shapes = [
        // Columns, rows, tokens, first token, hidden, blocks.
        [8, 1, 700, 0, 64, 2],
        [8, 3, 700, 37, 72, 1],
        [8, 8, 2000, 16, 128, 3],
        [8, 8, 2999, 5, 40, 6],
        [16, 9, 700, 16, 64, 6],
        [16, 16, 333, 47, 8, 2],
        [32, 20, 700, 37, 64, 2],
        [32, 20, 2100, 32, 136, 4],
        [32, 27, 15, 1, 16, 1],
        [32, 32, 1, 3, 64, 1],
        [96, 40, 900, 0, 64, 3],
        [96, 90, 600, 21, 40, 2],
        [192, 150, 330, 0, 64, 2],
        [256, 200, 200, 37, 40, 1],
        [8, 8, 3000, 64, 8192, 2],
    ];
    let every = |variant| (0..).zip(shapes).map(move |(at, shape)| Launch::new(at + 20 * variant, shape, variant));
    // Enough tokens and blocks that top-k has a cutoff.
    let more = (0..2).map(|at| Launch::new(70 + at, [16, 12, 5000, 48 + at, 40, 16], LISTS));
    [PLAIN, MASKS_PENALTIES, LISTS].into_iter().flat_map(every).chain(more).collect()
}

#[test]
fn the_blocks_draw_and_list_what_the_reference_does() {
    let Some(program) = emulated::program("fused_hopper") else { return };
    let launches = launches();
    let wrong_draws = |bound_factor: f32| {
        let mut bytes = (launches.len() as u32).to_le_bytes().to_vec();
        launches.iter().for_each(|launch| launch.write(bound_factor, &mut bytes));
        let found = emulated::answer(&program, bytes);
        let mut words = found.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b));
        let mut word = || words.next().expect("a draw for every row");
        let (mut wrong, mut short, mut full) = (Vec::new(), 0, 0);
        for (at, launch) in launches.iter().enumerate() {
            for r in 0..launch.rows.len() {
                let (draw, want) = ([word(), word(), word(), word()], launch.expected(r));
                if launch.variant == LISTS {
                    let (count, cut) = (word() as usize, word());
                    let keys: Vec<_> =
                        (0..count.min(ROOM)).map(|_| u64::from(word()) | u64::from(word()) << 32).collect();
                    // The host decides a row whose list is full.
                    if count > ROOM {
                        full += 1;
                        continue;
                    }
                    short += u32::from(launch.check_list(r, cut, &keys));
                }
                // The score of an invalid row is not compared.
                if draw != want && (want[3] < 2 || draw[0] != want[0] || draw[3] != want[3]) {
                    wrong.push((at, r, draw, want));
                }
            }
        }
        assert!(words.next().is_none() && short > 20 && full < 5, "{short} short lists, {full} full ones");
        wrong
    };
    let wrong = wrong_draws(1.0);
    assert!(wrong.is_empty(), "{} wrong draws: {:x?}", wrong.len(), &wrong[..wrong.len().min(5)]);
    // The negative control: bounds below the noise lose winners.
    assert!(wrong_draws(0.5).len() > 10);
}

/// Launches whose rows a shadow decides or leaves open.
fn shadow_launches() -> Vec<Launch> {
    let shapes = [
        [8, 1, 700, 0, 64, 2],
        [8, 3, 700, 37, 72, 1],
        [8, 8, 2000, 16, 200, 3],
        [16, 16, 333, 47, 8, 2],
        [32, 20, 2100, 32, 136, 4],
        [32, 32, 1, 3, 64, 1],
        [96, 40, 900, 0, 304, 3],
        [96, 90, 600, 21, 40, 2],
    ];
    let integers = (0..).zip(shapes).map(|(at, shape)| Launch::new(at + 300, shape, SHADOW));
    let real = (0..).zip(shapes).map(|(at, shape)| Launch::real(at + 400, shape, [0.5, 2.0, 4.0][at as usize % 3]));
    let mut launches: Vec<_> = integers.chain(real).filter(|launch| launch.soft_cap == 0.0).collect();
    // Huge and tiny weights, and a weight that is not finite.
    for (at, spread) in [1e36, 1e-36, 1e-41].into_iter().enumerate() {
        launches.push(Launch::real(500 + at as u32, [8, 6, 400, 0, 64, 2], spread));
    }
    let mut infinite = Launch::real(510, [8, 6, 400, 0, 64, 2], 1.0);
    infinite.weight[200 * 64 + 9] = f32::INFINITY;
    launches.push(infinite);
    launches.extend([along_a_residual(), with_small_digits(), with_a_large_column()]);
    launches
}

/// A row's hidden state is the residual of token 100, whose logit is above that of token 200. The shadow's logit of token 100 is
/// lower by nearly its whole bound, and that of token 200 is exact.
fn along_a_residual() -> Launch {
    const HIDDEN: usize = 64;
    let mut weight = vec![0.0; 300 * HIDDEN];
    let row = |salt: u32| (0..HIDDEN as u32).map(move |k| bf16(input(k + salt) as f32 * 2f32.powi(-31) - 1.0));
    for salt in 0.. {
        let token: Vec<f32> = row(1000 * salt).collect();
        let buffer = ShadowBuffer::new(&Matrix::new(&token, 1, HIDDEN).unwrap()).unwrap();
        let shadow = buffer.shadow();
        let copy = |k: usize| shadow.scales()[0] * f32::from(shadow.codes()[k]);
        let state: Vec<f32> = (0..HIDDEN).map(|k| bf16((token[k] - copy(k)) * 64.0)).collect();
        let dot = |of: &dyn Fn(usize) -> f32| (0..HIDDEN).map(|k| f64::from(of(k)) * f64::from(state[k])).sum::<f64>();
        let (exact, approximate) = (dot(&|k| token[k]), dot(&copy));
        let other = approximate + 0.97 * (exact - approximate);
        let place = (0..HIDDEN).find_map(|k| {
            let factor = bf16((other / f64::from(state[k])) as f32);
            let share = (f64::from(factor) * f64::from(state[k]) - approximate) / (exact - approximate);
            // A large factor would have a large bound.
            (share > 0.95 && share < 0.99 && factor.abs() < 10.0).then_some((k, factor))
        });
        let Some((k, factor)) = place.filter(|_| other > 0.0) else { continue };
        weight[100 * HIDDEN..101 * HIDDEN].copy_from_slice(&token);
        weight[200 * HIDDEN + k] = factor;
        return Launch::greedy([8, HIDDEN as u32, 2], weight, state);
    }
    unreachable!("a few rows are enough")
}

/// The elements of a hidden state that give token 100 the largest logit have no high digit.
fn with_small_digits() -> Launch {
    const HIDDEN: usize = 64;
    let mut weight = vec![0.0; 300 * HIDDEN];
    (1..HIDDEN).for_each(|k| weight[100 * HIDDEN + k] = 1.0);
    weight[200 * HIDDEN] = 0.1875;
    let mut state = vec![1.0 / 256.0; HIDDEN];
    state[0] = 1.0;
    Launch::greedy([8, HIDDEN as u32, 2], weight, state)
}

/// A column of the weight is so large that all other codes are zero. The hidden states have zeros there, so every token is a
/// candidate.
fn with_a_large_column() -> Launch {
    let mut launch = Launch::real(520, [8, 8, 12000, 0, 64, 3], 1.0);
    for row in &mut launch.rows {
        (row.mask, row.bias) = (Vec::new(), Vec::new());
    }
    launch.weight.chunks_mut(64).for_each(|token| token[0] = 1024.0);
    launch.states.chunks_mut(64).for_each(|state| state[0] = 0.0);
    launch
}

#[test]
fn a_draw_from_a_shadow_is_the_draw_from_the_weight() {
    let Some(program) = emulated::program("fused_hopper") else { return };
    let launches = shadow_launches();
    let wrong_draws = |launches: &[Launch], control| {
        let mut bytes = (launches.len() as u32).to_le_bytes().to_vec();
        for launch in launches {
            launch.write(1.0, &mut bytes);
            launch.write_shadow(control, &mut bytes);
        }
        let found = emulated::answer(&program, bytes);
        let mut words = found.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b));
        let mut word = || words.next().expect("a draw for every row");
        let (mut wrong, mut rows, mut open) = (Vec::new(), 0, 0);
        for (at, launch) in launches.iter().enumerate() {
            (rows, open) = (rows + launch.rows.len() as u32, open + word());
            for r in 0..launch.rows.len() {
                let (draw, want) = ([word(), word(), word(), word()], launch.expected(r));
                if draw != want && (want[3] < 2 || draw[0] != want[0] || draw[3] != want[3]) {
                    wrong.push((at, r, draw, want));
                }
            }
        }
        assert!(words.next().is_none());
        (wrong, rows, open)
    };
    let (wrong, rows, open) = wrong_draws(&launches, Control::None);
    assert!(wrong.is_empty(), "{} wrong draws: {:x?}", wrong.len(), &wrong[..wrong.len().min(5)]);
    // Both ways are taken: most rows are decided, and some are left open.
    println!("{open} of {rows} rows were left open");
    assert!(open > 10 && 4 * open < rows, "{open} of {rows} rows were left open");
    for control in [Control::SmallErrors, Control::OneDigit, Control::DroppedCandidates] {
        let last = &launches[launches.len() - 3..];
        assert!(!wrong_draws(last, control).0.is_empty(), "{control:?} was not detected");
    }
}
