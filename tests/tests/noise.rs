//! The scalar noise compared with the vectors, and its law without a sampler.

use flash_sampling_conformance::noise_map::{self, Groups, Version2};
use flash_sampling_conformance::vectors::{self, lines, number};
use flash_sampling_conformance::{Effort, LawFailure, granules};
use flash_sampling_core::noise::granule::{self, Granule};
use flash_sampling_core::noise::log::ln;
use flash_sampling_core::noise::uniform::{TAIL_WORDS, exponential, gumbel};
use flash_sampling_core::{Domain, Noise};

#[test]
fn philox_gives_the_known_answers() {
    let mut seen = 0;
    for fields in lines(vectors::PHILOX) {
        assert_eq!(fields[..2], ["philox4x32", "10"]);
        let words: Vec<u32> = fields[2..].iter().map(|w| u32::from_str_radix(w, 16).expect("hexadecimal")).collect();
        let found = rand_philox::philox4x32_10([words[0], words[1], words[2], words[3]], [words[4], words[5]]);
        assert_eq!(found, words[6..], "{fields:?}");
        seen += 1;
    }
    assert!(seen >= 16);
}

#[test]
fn words_become_the_exponentials_and_gumbels_of_the_vectors() {
    let mut seen = 0;
    for fields in lines(vectors::GUMBEL) {
        let [word, refinement, e, g] = [0, 1, 2, 3].map(|i| number(fields[i]) as u32);
        assert_eq!(exponential(word, || refinement).to_bits(), e, "exponential of {word:#x}, {refinement:#x}");
        assert_eq!(gumbel(word, || refinement).to_bits(), g, "Gumbel of {word:#x}, {refinement:#x}");
        seen += 1;
    }
    assert!(seen > 300);
}

#[test]
fn granules_have_the_exponentials_and_gumbels_of_the_vectors() {
    let mut seen = 0;
    for fields in lines(vectors::GRANULE) {
        let [word, refinement, other, leader, minimum, e, g] = core::array::from_fn(|i| number(fields[i]) as u32);
        let granule = Granule::of_word(word, || refinement);
        let found = granule.exponential(leader ^ 1, || other);
        assert_eq!((granule.leader, granule.minimum.to_bits()), (leader, minimum), "{fields:?}");
        assert_eq!((found.to_bits(), (-ln(found)).to_bits()), (e, g), "{fields:?}");
        seen += 1;
    }
    assert!(seen > 250);
}

#[test]
fn tokens_have_the_noise_of_the_vectors() {
    let rare = |part: u32, largest: u32| part < TAIL_WORDS || part > largest - TAIL_WORDS;
    let (mut leaders, mut others) = (0, [0, 0]);
    for fields in lines(vectors::NOISE) {
        let [seed, position, draw, token, bits] = [0, 1, 2, 3, 4].map(|i| number(fields[i]));
        let (noise, draw, token) = (Noise::new(seed, position).expect("a valid position"), draw as u32, token as u32);
        assert_eq!(u64::from(noise.gumbel(Domain::Token, draw, token).to_bits()), bits, "{fields:?}");
        let granule = noise.word(Domain::Granule, draw, granule::of(token));
        let in_rare_granule = rare(granule::minimum_bits(granule), granule::minimum_bits(!0));
        if token % granule::TOKENS == granule % granule::TOKENS {
            leaders += u32::from(in_rare_granule);
        } else {
            others[0] += u32::from(in_rare_granule);
            others[1] += u32::from(rare(noise.word(Domain::Token, draw, token), !0));
        }
    }
    assert!(leaders >= 8 && others.iter().all(|&n| n >= 8), "rare words: {leaders} leaders, {others:?} other tokens");
}

#[test]
fn noise_reaches_into_the_tail() -> Result<(), LawFailure> {
    println!("{}", noise_map::check(&Version2, Effort::Quick, &|_| ())?);
    Ok(())
}

#[test]
fn the_noise_of_groups_reaches_into_the_tail() {
    for p in [1e-3, 1e-6, 3e-8, 1e-9, 1e-12] {
        let (what, bias) = noise_map::biases(&Groups, p)[0];
        println!("{what} of {p:e}: relative bias {bias:e}");
        assert!(bias.abs() < noise_map::BIAS_LIMIT);
    }
}

#[test]
fn tokens_of_a_granule_are_independent() -> Result<(), LawFailure> {
    println!("{}", granules::check(&Version2, Effort::Quick)?);
    Ok(())
}
