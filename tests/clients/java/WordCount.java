// Kafka Streams counts words with exactly_once_v2: `WordCount BOOTSTRAP STATE-FOLDER`. The application is stopped half
// way and begun anew; each word has to be counted once all the same. Prints `what=value` a line.

import java.nio.file.Path;
import java.time.Duration;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.TreeMap;
import java.util.UUID;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.LongDeserializer;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.StreamsConfig;
import org.apache.kafka.streams.kstream.Grouped;
import org.apache.kafka.streams.kstream.Materialized;
import org.apache.kafka.streams.kstream.Produced;
import org.apache.kafka.streams.state.Stores;

public class WordCount {
    static final long DEADLINE_NS = Duration.ofSeconds(90).toNanos();
    static final String LINE = "water wheel water mill wheel water";
    static final int LINES = 50;
    static String bootstrap;

    static KafkaStreams streams(String application, String source, String target, String folder) {
        StreamsBuilder builder = new StreamsBuilder();
        builder.<String, String>stream(source)
            .flatMapValues(line -> Arrays.asList(line.split(" ")))
            .groupBy((key, word) -> word, Grouped.with(Serdes.String(), Serdes.String()))
            .count(Materialized.as(Stores.inMemoryKeyValueStore("counts")))
            .toStream()
            .to(target, Produced.with(Serdes.String(), Serdes.Long()));
        Properties p = new Properties();
        p.put(StreamsConfig.APPLICATION_ID_CONFIG, application);
        p.put(StreamsConfig.BOOTSTRAP_SERVERS_CONFIG, bootstrap);
        p.put(StreamsConfig.PROCESSING_GUARANTEE_CONFIG, StreamsConfig.EXACTLY_ONCE_V2);
        p.put(StreamsConfig.STATE_DIR_CONFIG, folder);
        p.put(StreamsConfig.REPLICATION_FACTOR_CONFIG, 1);
        p.put(StreamsConfig.DEFAULT_KEY_SERDE_CLASS_CONFIG, Serdes.StringSerde.class);
        p.put(StreamsConfig.DEFAULT_VALUE_SERDE_CLASS_CONFIG, Serdes.StringSerde.class);
        p.put("auto.offset.reset", "earliest");
        p.put("session.timeout.ms", "6000");
        p.put("heartbeat.interval.ms", "500");
        return new KafkaStreams(builder.build(), p);
    }

    // The last count of each word, of committed records, when it is as wanted or the time is up.
    static Map<String, Long> counts(String target, long water) {
        Properties p = new Properties();
        p.put("bootstrap.servers", bootstrap);
        p.put("isolation.level", "read_committed");
        Map<String, Long> last = new TreeMap<>();
        try (KafkaConsumer<String, Long> consumer = new KafkaConsumer<>(p, new StringDeserializer(), new LongDeserializer())) {
            List<TopicPartition> all = List.of(new TopicPartition(target, 0), new TopicPartition(target, 1));
            consumer.assign(all);
            consumer.seekToBeginning(all);
            long end = System.nanoTime() + DEADLINE_NS;
            while (!last.equals(Map.of("water", water, "wheel", water * 2 / 3, "mill", water / 3)) && System.nanoTime() < end)
                for (ConsumerRecord<String, Long> r : consumer.poll(Duration.ofMillis(100))) last.put(r.key(), r.value());
        }
        return last;
    }

    static void write(String source) {
        try (KafkaProducer<String, String> producer = new KafkaProducer<>(Map.of("bootstrap.servers", bootstrap), new StringSerializer(), new StringSerializer())) {
            for (int n = 0; n < LINES; n++) producer.send(new ProducerRecord<>(source, n % 2, null, LINE));
        }
    }

    public static void main(String[] arguments) throws Exception {
        bootstrap = arguments[0];
        String name = "words-" + UUID.randomUUID(), target = name + "-counts";
        try (Admin admin = Admin.create(Map.of("bootstrap.servers", bootstrap))) {
            admin.createTopics(List.of(new NewTopic(name, 2, (short) 1), new NewTopic(target, 2, (short) 1))).all().get();
        }
        for (int round = 1; round <= 2; round++) {
            write(name);
            try (KafkaStreams streams = streams(name, name, target, Path.of(arguments[1], "state").toString())) {
                streams.start();
                System.out.println("round " + round + "=" + counts(target, 3L * LINES * round));
            }
        }
    }
}
