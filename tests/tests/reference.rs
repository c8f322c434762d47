//! The suite on the float64 reference, in all four variants.

#[path = "backends/referee.rs"]
mod referee;

use flash_sampling_conformance::suite;
use referee::Referee;

suite!(tiled, Referee("tiled"));
suite!(grouped, Referee("grouped"));
suite!(online, Referee("online"));
suite!(sharded, Referee("sharded"));
