//! The suite on vocabulary shards in one process, and on ranks that exchange summaries.
//!
//! Shards have both merges, equal and unequal sizes, an empty shard, and samplers of different kinds.

mod backends;

use backends::ranks::{Ranks, loopback};
use backends::referee::Referee;
use backends::{Cpu, Kind, Shards};
use flash_sampling_conformance::{SamplerFactory, suite};
use flash_sampling_cpu::Isa;
use flash_sampling_distributed::ShardMerge;

/// The sampler of shards.
static PORTABLE: Cpu = Cpu::new(Kind::Tiled, Isa::Portable);

fn shards(name: &'static str, merge: ShardMerge, equal: Option<u32>) -> Shards<'static> {
    const TILED: &[&dyn SamplerFactory] = &[&PORTABLE];
    Shards { name, merge, shards: TILED, equal }
}

fn mixed(name: &'static str, merge: ShardMerge) -> Shards<'static> {
    const MIXED: &[&dyn SamplerFactory] = &[&PORTABLE, &Referee("tiled")];
    Shards { name, merge, shards: MIXED, equal: None }
}

suite!(winners_uneven, shards("winners/uneven", ShardMerge::Winners, None));
suite!(winners_8, shards("winners/8", ShardMerge::Winners, Some(8)));
suite!(log_mass_uneven, shards("log_mass/uneven", ShardMerge::LogMass, None));
suite!(log_mass_3, shards("log_mass/3", ShardMerge::LogMass, Some(3)));
suite!(winners_mixed, mixed("winners/mixed", ShardMerge::Winners));
suite!(log_mass_mixed, mixed("log_mass/mixed", ShardMerge::LogMass));

fn ranks(name: &'static str, merge: ShardMerge) -> Ranks<'static> {
    Ranks { name, merge, local: &PORTABLE, equal: None, transports: &loopback }
}

suite!(loopback_winners, ranks("loopback/winners", ShardMerge::Winners));
suite!(loopback_log_mass, ranks("loopback/log_mass", ShardMerge::LogMass));
