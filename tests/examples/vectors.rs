//! Writes a file of `vectors/` from the scalar definitions, when the noise gets a new version.
//!
//! `cargo run --release -p flash-sampling-conformance --example vectors -- NAME > tests/vectors/NAME.txt`
//!
//! NAME is `philox4x32`, `gumbel`, `granule`, `noise` or `value_stability`.

use flash_sampling_conformance::data::hash;
use flash_sampling_conformance::laws::{scheme_name, stability_problem, stability_schemes};
use flash_sampling_core::noise::granule::{Granule, TOKENS, minimum_bits};
use flash_sampling_core::noise::log::ln;
use flash_sampling_core::noise::uniform::{TAIL_WORDS, exponential, gumbel};
use flash_sampling_core::reference::Reference;
use flash_sampling_core::{Domain, Noise, PerturbedArgmax, Plan, RowParams, Samples};

/// Writes Random123's three cases for philox4x32-10 (zeros, ones, pi), then 13 cases of hashed words.
fn philox() {
    println!("# philox4x32-10 in the format of Random123's kat_vectors: name rounds counter[4] key[2] result[4].");
    println!("# The first three are Random123's own known answers (Salmon et al. 2011).");
    let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344, 0xa409_3822, 0x299f_31d0];
    let mut cases = vec![[0u32; 6], [!0; 6], pi];
    for i in 0..13u64 {
        cases.push(core::array::from_fn(|j| hash(i, j as u64) as u32));
    }
    for [c0, c1, c2, c3, k0, k1] in cases {
        let r = rand_philox::philox4x32_10([c0, c1, c2, c3], [k0, k1]);
        let hex: Vec<String> = [c0, c1, c2, c3, k0, k1].iter().chain(&r).map(|w| format!("{w:08x}")).collect();
        println!("philox4x32 10 {}", hex.join(" "));
    }
}

/// Writes uniform words: both ends, the limits of the refined tail, powers of two with their neighbours, and a stride.
fn gumbels() {
    println!("# word refinement exponential_bits gumbel_bits; the refinement matters for words below {TAIL_WORDS}.");
    let corners = (0..32u32).flat_map(|k| [(1u32 << k) - 1, 1 << k, (1 << k) + 1, !(1u32 << k)]);
    let tail = (0..TAIL_WORDS).step_by(37).chain([TAIL_WORDS - 1, TAIL_WORDS]);
    let stride = (0..200u32).map(|i| i.wrapping_mul(21_474_837));
    for word in corners.chain(tail).chain(stride).chain([0, !0]) {
        let refinements = if word < TAIL_WORDS { vec![0, 1, 0x8000_0000, 0xdead_beef, !0] } else { vec![0] };
        for r in refinements {
            let (e, g) = (exponential(word, || r), gumbel(word, || r));
            println!("{word:#010x} {r:#010x} {:#010x} {:#010x}", e.to_bits(), g.to_bits());
        }
    }
}

/// Writes the corresponding words of granules. Every index is a leader, and the word of the other token takes corner
/// cases.
fn granules() {
    println!(
        "# granule_word refinement token_word leader minimum_bits exponential_bits gumbel_bits: the leader's place and"
    );
    println!(
        "# exponential, then exponential and Gumbel of another token. Words below {} are refined.",
        TAIL_WORDS * TOKENS
    );
    let corners = (0..28u32).flat_map(|k| [(1u32 << k) - 1, 1 << k, (1 << k) + 1, (1 << 28) - 1 - (1 << k)]);
    let tail = (0..TAIL_WORDS).step_by(37).chain([TAIL_WORDS - 1, TAIL_WORDS]);
    let stride = (0..100u32).map(|i| i * 2_684_351);
    let others = [0, !0, 255, 256, (1 << 31) - 1, 1 << 31, 0x0123_4567, 0x89ab_cdef];
    for (i, minimum) in (0..).zip(corners.chain(tail).chain(stride).chain([0, (1 << 28) - 1])) {
        let word = minimum * TOKENS + i * 7 % TOKENS;
        let refinements = if minimum < TAIL_WORDS { vec![0, 0x8000_0000, 0xdead_beef, !0] } else { vec![0] };
        for (k, r) in (i as usize..).zip(refinements) {
            let (granule, other) = (Granule::of_word(word, || r), others[k % others.len()]);
            let e = granule.exponential(granule.leader ^ 1, || other);
            let bits = [granule.minimum, e, -ln(e)].map(|x| format!("{:#010x}", x.to_bits())).join(" ");
            println!("{word:#010x} {r:#010x} {other:#010x} {} {bits}", granule.leader);
        }
    }
}

/// Finds rare words of a domain: six whose `part` is among the `TAIL_WORDS` smallest, and six among the largest. Each
/// result is (position, index, word).
fn rarest(domain: Domain, positions: u64, blocks: u32, part: fn(u32) -> u32) -> Vec<(u64, u32, u32)> {
    let (mut found, mut ends) = (Vec::new(), [0, 0]);
    for noise in (0..positions).filter_map(|position| Some((position, Noise::new(2026, position)?))) {
        for block in 0..blocks {
            for (index, word) in (4 * block..).zip(noise.1.words(domain, 0, block)) {
                let rare = [part(word) < TAIL_WORDS, part(word) > part(!0) - TAIL_WORDS];
                if (0..2).any(|end| rare[end] && ends[end] < 6) {
                    (0..2).for_each(|end| ends[end] += u32::from(rare[end]));
                    found.push((noise.0, index, word));
                }
            }
        }
    }
    found
}

/// Writes ordinary noise, then tokens below 4096 with rare words.
///
/// For a rare word of a granule, the tokens are its leader and the leader's neighbour. A rare word of a token gives the
/// token itself. The search covers 2^23 words of granules and 2^26 words of tokens.
fn noise() {
    println!("# seed position draw token gumbel_bits: the noise of a token.");
    println!(
        "# After 32 lines come pairs of a leader and another token of a granule with a rare word, then tokens with a rare"
    );
    println!(
        "# word of their own. Of 2^32 words (2^28 minima) the {TAIL_WORDS} smallest and the {TAIL_WORDS} largest are rare."
    );
    let line = |seed: u64, position: u64, draw: u32, token: u32| {
        if let Some(noise) = Noise::new(seed, position) {
            let bits = noise.gumbel(Domain::Token, draw, token).to_bits();
            println!("{seed:#x} {position:#x} {draw:#x} {token} {bits:#010x}");
        }
    };
    for i in 0..32u64 {
        line(hash(1, i), hash(2, i) >> 8, hash(3, i) as u32, hash(4, i) as u32 % 4096);
    }
    for (position, granule, word) in rarest(Domain::Granule, 1 << 15, 64, minimum_bits) {
        let leader = granule * TOKENS + word % TOKENS;
        line(2026, position, 0, leader);
        line(2026, position, 0, leader ^ 1);
    }
    for (position, token, _) in rarest(Domain::Token, 1 << 14, 1024, |word| word) {
        line(2026, position, 0, token);
    }
}

/// Writes 24 tokens of each scheme.
fn value_stability() {
    println!("# scheme seed position draw token. Line i of a scheme draws from row i mod 8 of");
    println!("# Problem::integers(Size::new(8, 5003, 32), BF16, BF16, 2026) of the conformance suite.");
    let problem = stability_problem();
    for scheme in stability_schemes() {
        let plan = Plan { max_rows: 8, ..Plan::default() };
        let mut reference = Reference::new(problem.head(), plan, scheme.clone());
        for call in 0..3u64 {
            let rows: Vec<RowParams<'_>> = (0..8u64)
                .map(|r| RowParams {
                    seed: [42, hash(7, r)][(call > 0) as usize],
                    position: r + 8 * call,
                    first_draw: call as u32 / 2 * 5,
                    ..RowParams::default()
                })
                .collect();
            let mut out = Samples::new();
            reference.sample(problem.input(), &rows, &mut out).expect("the problem fits its plan");
            for (row, found) in rows.iter().zip(out.iter()) {
                let token = found.expect("the logits are finite").token();
                println!("{} {:#x} {} {} {token}", scheme_name(&scheme), row.seed, row.position, row.first_draw);
            }
        }
    }
}

fn main() {
    match std::env::args().nth(1).as_deref() {
        Some("philox4x32") => philox(),
        Some("gumbel") => gumbels(),
        Some("granule") => granules(),
        Some("noise") => noise(),
        Some("value_stability") => value_stability(),
        _ => {
            eprintln!("usage: vectors philox4x32|gumbel|granule|noise|value_stability");
            std::process::exit(2);
        }
    }
}
